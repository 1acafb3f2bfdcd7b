"""The workloads that offline engines are compared on, for one model shape.

    bench-N        nano-vLLM's bench.py, drawn with seed N
    bs1            one 128-token prompt, 512 new tokens
    prefill        64 prompts of 2048 random tokens, 1 new token each
    shared-prefix  256 prompts of 2048 common and 64 own tokens, 64 new tokens each, after one
                   request that seeds the prefix
    wide           1024 prompts of 128 tokens, 128 new tokens each
    first-token    one 128-token prompt, 1 new token; only if named
    long           4 prompts of 32,000 tokens, 1 new token each; only if named, and with
                   --max-model-len 32768
    chats          1024 prompts of 243 and outputs of 200 tokens in the mean, exponentially
                   distributed: ShareGPT's mean lengths, about; only if named
    summaries      1024 prompts of 1024 tokens, 128 new tokens each; only if named

    python benchmarks/workloads.py --dummy qwen3-0.6b [--only bs1 wide] [--repeat 3]

Each is warmed up by one run and repeated; the prefix cache is emptied before every run. Prints
median and range, what of the hardware's limit that is (as `bench.py` does), and JSON as the last
line, which --save FILE appends to FILE.
"""

import argparse
import logging
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness, limits
from nanovllm.cli import bench


class Workload(NamedTuple):
    """Prompts and one `SamplingParams` each.

    Attributes:
        per_second: report generated tokens per second; else seconds.
        num_shared: tokens that all prompts begin with; they are cached when the clock starts.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    per_second: bool
    num_shared: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to generate."""
        return sum(harness.num_new_tokens(self.params))


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """`length` random token ids in 0..10000."""
    return [rng.randint(0, 10000) for _ in range(length)]


def many(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """`count` random prompts of `length` tokens."""
    return [random_prompt(rng, length) for _ in range(count)]


def uniform(
    prompts: list[list[int]], max_tokens: int, per_second: bool, num_shared: int = 0
) -> Workload:
    """A workload with the same parameters for every prompt."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    return Workload(prompts, [params] * len(prompts), per_second, num_shared)


def shared_prefix(rng: random.Random) -> Workload:
    """256 prompts that begin with the same 2048 tokens."""
    common = random_prompt(rng, 2048)
    return uniform([common + own for own in many(rng, 256, 64)], 64, False, 2048)


def chats(rng: random.Random) -> Workload:
    """1024 prompts whose lengths, and those of their outputs, are exponentially distributed."""
    lengths = [[1 + int(rng.expovariate(1 / mean)) for mean in (243, 200)] for _ in range(1024)]
    prompts = [random_prompt(rng, min(length, 2048)) for length, _ in lengths]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=min(length, 2000))
        for _, length in lengths
    ]
    return Workload(prompts, params, True)


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "bench-0": lambda rng: Workload(*harness.workload(256, 0, 10001), True),
    "bench-1": lambda rng: Workload(*harness.workload(256, 1, 10001), True),
    "bench-2": lambda rng: Workload(*harness.workload(256, 2, 10001), True),
    "bs1": lambda rng: uniform(many(rng, 1, 128), 512, True),
    "prefill": lambda rng: uniform(many(rng, 64, 2048), 1, False),
    "shared-prefix": shared_prefix,
    "wide": lambda rng: uniform(many(rng, 1024, 128), 128, True),
    "first-token": lambda rng: uniform(many(rng, 1, 128), 1, False),
    "long": lambda rng: uniform(many(rng, 4, 32000), 1, False),
    "chats": chats,
    "summaries": lambda rng: uniform(many(rng, 1024, 1024), 128, True),
}
IF_NAMED = ("first-token", "long", "chats", "summaries")


def make(name: str, vocab_size: int) -> Workload:
    """A workload; ids are folded into a vocabulary below 10000."""
    workload = WORKLOADS[name](random.Random(0))
    prompts = [[token % vocab_size for token in prompt] for prompt in workload.prompts]
    return workload._replace(prompts=prompts)


def measure(llm: LLM, workload: Workload) -> float:
    """Seconds of one run."""
    llm.reset_prefix_cache()
    if workload.num_shared:
        seed = workload.prompts[0][: workload.num_shared] + [0] * 64
        llm.generate([seed], SamplingParams(max_tokens=1), use_tqdm=False)
    return harness.run_once(llm, workload.prompts, workload.params, progress=False)[1]


def result_of(workload: Workload, seconds: list[float]) -> dict[str, Any]:
    """The runs and their median, in the unit of the workload. A rate is that of the median time."""
    median = statistics.median(seconds)
    if not workload.per_second:
        return {"median": median, "runs": sorted(seconds), "unit": "s"}
    tokens = workload.num_tokens
    return {"median": tokens / median, "runs": sorted(tokens / s for s in seconds), "unit": "tok/s"}


def main() -> None:
    """Run the workloads and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(WORKLOADS),
        default=[name for name in WORKLOADS if name not in IF_NAMED],
        help=f"workloads (all but {' and '.join(IF_NAMED)})",
    )
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    llm, construction = bench.build(args)
    print(f"LLM(...): {construction:.2f} s")
    results = {}
    for name in args.only:
        workload = make(name, llm.model_config.vocab_size)
        measure(llm, workload)  # warm-up
        seconds = [measure(llm, workload) for _ in range(args.repeat)]
        achieved = harness.achieved(
            llm,
            workload.prompts,
            workload.params,
            statistics.median(seconds),
            bandwidth=args.bandwidth,
            flops=args.flops,
            num_shared=workload.num_shared,
        )
        result = result_of(workload, seconds)
        digits = 0 if workload.per_second else 3 if result["median"] > 0.1 else 5
        low, median, high = (
            f"{x:.{digits}f}" for x in (result["runs"][0], result["median"], result["runs"][-1])
        )
        line = f"{name:14s} {median:>10s} {result['unit']}  ({low}-{high}), "
        print(line + limits.describe(achieved), flush=True)
        results[name] = {**result, **achieved}
    result = {
        "benchmark": "workloads",
        "model": bench.model_name(args),
        "construction_s": round(construction, 2),
        "results": results,
        **harness.conditions(llm),
    }
    llm.exit()
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
