"""Make training data: draw several answers to each problem, and keep those that a check accepts.

python examples/synthetic_data.py
python examples/synthetic_data.py --model Qwen/Qwen3-0.6B --temperature 0.8 --max-tokens 512
"""

import argparse
import json
import random
import re
from pathlib import Path

from nanovllm import LLM, TINY, SamplingParams


def is_right(answer: str, a: int, b: int) -> bool:
    """Whether the last number of an answer is the sum. Python knows it, whatever the model says."""
    numbers = re.findall(r"\d+", answer.replace(",", ""))
    return bool(numbers) and int(numbers[-1]) == a + b


def main() -> None:
    """Write the examples that are right, each once, as conversations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--problems", type=int, default=100, help="(100)")
    parser.add_argument("--answers", type=int, default=4, help="drawn for each problem (4)")
    parser.add_argument("--temperature", type=float, default=2.0, help="(2.0: some answers err)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--output", type=Path, default=Path("synthetic.jsonl"), help="JSON lines")
    args = parser.parse_args()

    rng = random.Random(0)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(args.problems)]
    asked = [{"role": "user", "content": f"{a}+{b}="} for a, b in pairs]
    params = [  # with seeds, the same command draws the same answers
        SamplingParams(args.temperature, args.max_tokens, n=args.answers, seed=args.answers * i)
        for i in range(len(pairs))
    ]
    with LLM(args.model) as llm:
        outputs = llm.chat([[message] for message in asked], params)

    num_drawn, num_right, examples = 0, 0, {}
    for (a, b), message, output in zip(pairs, asked, outputs, strict=True):
        for answer in output.outputs:
            right = answer.finish_reason == "stop" and is_right(answer.text, a, b)
            num_drawn, num_right = num_drawn + 1, num_right + right
            if right:
                messages = [message, {"role": "assistant", "content": answer.text}]
                examples[a, b, answer.text] = json.dumps({"messages": messages})
    args.output.write_text("".join(line + "\n" for line in examples.values()), "utf-8")
    print(
        f"{num_right} of {num_drawn} answers are right: {len(examples)} examples in {args.output}"
    )


if __name__ == "__main__":
    main()
