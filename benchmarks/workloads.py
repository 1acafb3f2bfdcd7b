"""The workloads that offline engines are compared on, for one model shape.

    bench-N        nano-vLLM's bench.py, drawn with seed N
    bs1            one 128-token prompt, 512 new tokens
    prefill        64 prompts of 2048 random tokens, 1 new token each
    shared-prefix  256 prompts of 2048 common and 64 own tokens, 64 new tokens each, after one
                   request that seeds the prefix
    wide           1024 prompts of 128 tokens, 128 new tokens each

    python benchmarks/workloads.py --dummy qwen3-0.6b [--only bs1 wide] [--repeat 3]

Each is warmed up by one run and repeated; the prefix cache is emptied before every run. Prints
median and range, and JSON as the last line.
"""

import argparse
import json
import logging
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench
from nanovllm import LLM, SamplingParams


class Workload(NamedTuple):
    """Prompts, one `SamplingParams` each, and prompts that run before the clock starts."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    before: list[list[int]]
    per_second: bool  # report generated tokens per second; else seconds


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """`length` random token ids in 0..10000."""
    return [rng.randint(0, 10000) for _ in range(length)]


def uniform(
    prompts: list[list[int]], max_tokens: int, before: list[list[int]], per_second: bool
) -> Workload:
    """A workload with the same parameters for every prompt."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    return Workload(prompts, [params] * len(prompts), before, per_second)


def shared_prefix(rng: random.Random) -> Workload:
    """256 prompts that begin with the same 2048 tokens."""
    common = random_prompt(rng, 2048)
    prompts = [common + random_prompt(rng, 64) for _ in range(256)]
    return uniform(prompts, 64, [common + random_prompt(rng, 64)], False)


def many(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """`count` random prompts of `length` tokens."""
    return [random_prompt(rng, length) for _ in range(count)]


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "bench-0": lambda rng: Workload(*bench.workload(256, 0, 10001), [], True),
    "bench-1": lambda rng: Workload(*bench.workload(256, 1, 10001), [], True),
    "bench-2": lambda rng: Workload(*bench.workload(256, 2, 10001), [], True),
    "bs1": lambda rng: uniform(many(rng, 1, 128), 512, [], True),
    "prefill": lambda rng: uniform(many(rng, 64, 2048), 1, [], False),
    "shared-prefix": shared_prefix,
    "wide": lambda rng: uniform(many(rng, 1024, 128), 128, [], True),
}


def measure(llm: LLM, workload: Workload) -> float:
    """Tokens per second, or seconds, of one run."""
    llm.reset_prefix_cache()
    if workload.before:
        llm.generate(workload.before, SamplingParams(max_tokens=1), use_tqdm=False)
    tokens, seconds = bench.run_once(llm, workload.prompts, workload.params, progress=False)
    return tokens / seconds if workload.per_second else seconds


def main() -> None:
    """Run the workloads and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dummy", choices=sorted(bench.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeat", type=bench.positive, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    args.model, args.block_size, args.enforce_eager = None, 256, False
    llm, construction = bench.build(args)
    print(f"LLM(...): {construction:.2f} s")
    results = {}
    for name in args.only:
        workload = WORKLOADS[name](random.Random(0))
        measure(llm, workload)  # warm-up
        runs = sorted(measure(llm, workload) for _ in range(args.repeat))
        median, digits = statistics.median(runs), 0 if workload.per_second else 3
        unit = "tok/s" if workload.per_second else "s"
        spread = f"{runs[0]:.{digits}f}-{runs[-1]:.{digits}f}"
        print(f"{name:14s} {median:10.{digits}f} {unit}  ({spread})", flush=True)
        results[name] = {"median": median, "runs": runs, "unit": unit}
    print(
        json.dumps(
            {
                "model": args.dummy,
                "construction_s": round(construction, 2),
                "results": results,
                **bench.conditions(llm),
            }
        )
    )


if __name__ == "__main__":
    main()
