"""Answer a file of prompts. The same command again goes on where it was interrupted or killed.

    python examples/prompts_file.py        # two hundred sums, by the embedded checkpoint
    python examples/prompts_file.py --input prompts.jsonl --output answers.jsonl --model DIRECTORY

A row is an object with `prompt` or `messages`; its other fields are in its result, too.
"""

import argparse
import json
from pathlib import Path

from nanovllm import LLM, TINY, SamplingParams
from nanovllm.batch import ResumableSink, read_rows, run


def write_sums(path: str) -> None:
    """An input: 200 sums, and a prompt that is too long."""
    rows = [{"prompt": f"{100 + 4 * i}+{900 - 3 * i}=", "sum": 1000 + i} for i in range(200)]
    lines = [json.dumps(row) for row in [*rows, {"prompt": "9" * 5000}]]
    Path(path).write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Answer the rows that have no result yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", help="JSON lines, Parquet or text (sums.jsonl, which is made)")
    parser.add_argument("--output", default="answers.jsonl", help="(answers.jsonl)")
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--replicas", type=int, default=1, help="engines, each on its GPU (1)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (256)")
    args = parser.parse_args()
    if args.input is None:
        args.input = "sums.jsonl"
        write_sums(args.input)

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    job = {"model": args.model, "max_tokens": args.max_tokens}  # an output of another is refused
    sink = ResumableSink(args.output, job)
    with sink, LLM(args.model, data_parallel_size=args.replicas) as llm:
        before = sink.num_finished
        try:
            for result in run(llm, sink.unfinished(read_rows(args.input)), params, chat=True):
                sink.write(result)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on")
        total, errors = sink.num_finished, sink.num_errors
    print(f"{args.output}: {total} results, {total - before} of them new, {errors} with an error")


if __name__ == "__main__":
    main()
