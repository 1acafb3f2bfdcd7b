"""Order documents by how well they answer a query, as Qwen3-Reranker judges them.

python examples/rerank.py
python examples/rerank.py --model Qwen/Qwen3-Reranker-0.6B "how tides come about" *.txt
"""

import argparse
import math
from functools import partial
from pathlib import Path

from nanovllm import LLM, TINY, SamplingParams

# The prompt that these models were trained with: the answer is one token, "yes" or "no".
BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
DOCUMENTS = [
    "Bread rises while yeast ferments the sugar of the dough.",
    "The Moon's pull raises the water on the near and the far side of the turning Earth.",
    "Sea salt is won by evaporation.",
]


def score(llm: LLM, query: str, documents: list[str], task: str = TASK) -> list[float]:
    """The probability of "yes" among "yes" and "no", for each document."""
    encode = partial(llm.get_tokenizer().encode, add_special_tokens=False, verbose=False)
    begin, end = encode(BEGIN), encode(END)
    room = llm.max_model_len - 1 - len(begin) - len(end)  # longer documents are cut
    asked = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {each}" for each in documents]
    prompts = [begin + encode(text)[:room] + end for text in asked]
    yes, no = encode("yes")[0], encode("no")[0]
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[yes, no])
    scores = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        [place] = output.outputs[0].logprobs or []  # of one token
        scores.append(1 / (1 + math.exp(place[no].logprob - place[yes].logprob)))
    return scores


def main() -> None:
    """Print the documents, the best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("query", nargs="?", default="Why do seas rise and fall?", help="a question")
    parser.add_argument("files", nargs="*", type=Path, help="a document each")
    args = parser.parse_args()
    documents = [path.read_text("utf-8") for path in args.files] or DOCUMENTS
    with LLM(args.model) as llm:
        scores = score(llm, args.query, documents)
    for value, document in sorted(zip(scores, documents, strict=True), reverse=True):
        print(f"{value:.3f}  {document[:80]}")


if __name__ == "__main__":
    main()
