"""Score texts: choose the likeliest answer, and measure the perplexity of a text.

python examples/scoring.py
python examples/scoring.py --model Qwen/Qwen3-0.6B --text README.md
"""

import argparse
import math
from pathlib import Path

from nanovllm import LLM, TINY

QUESTION, ANSWERS = "127+345=", ["462", "471", "472", "572"]
COUNT = "count from 17:18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37"
TEXTS = [COUNT, COUNT.replace("30 31", "31 30")]  # the embedded checkpoint has learnt to count
LENGTH, CONTEXT = 1024, 256  # tokens of a piece of text, and those of them that are its context


def choose(llm: LLM, question: str, answers: list[str]) -> list[float]:
    """The log-probability of each answer after the question."""
    encode = llm.get_tokenizer().encode
    context = encode(question)
    texts = [context + encode(answer, add_special_tokens=False) for answer in answers]
    scores = llm.score(texts, use_tqdm=False)  # of all tokens but the first
    return [math.fsum(score.logprobs[len(context) - 1 :]) for score in scores]


def perplexity(llm: LLM, text: str) -> tuple[float, float]:
    """Perplexity of a text of any length, per token and as tokenizer-independent bits per byte."""
    ids = llm.get_tokenizer().encode(text, verbose=False)  # it need not fit into the context
    starts = range(0, max(1, len(ids) - CONTEXT), LENGTH - CONTEXT)
    scores = llm.score([ids[start : start + LENGTH] for start in starts], use_tqdm=False)
    total, count = 0.0, 0
    for start, score in zip(starts, scores, strict=True):
        new = score.logprobs[CONTEXT - 1 if start else 0 :]  # each token counts once
        total, count = total + math.fsum(new), count + len(new)
    return math.exp(-total / count), -total / math.log(2) / len(text.encode())


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--text", type=Path, help="a file (two counts, one of them wrong)")
    args = parser.parse_args()
    texts = [args.text.read_text("utf-8")] if args.text else TEXTS

    with LLM(args.model) as llm:
        for answer, logprob in zip(ANSWERS, choose(llm, QUESTION, ANSWERS), strict=True):
            print(f"{QUESTION}{answer}  log-probability {logprob:.2f}")
        for text in texts:
            per_token, bits = perplexity(llm, text)
            print(f"{len(text)} characters: perplexity {per_token:.2f}, {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
