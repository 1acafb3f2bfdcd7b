"""What a step of several GPUs costs after one of them was late.

    python benchmarks/late_rank.py --dummy qwen3-8b --quantization fp8 --kv-cache-dtype fp8 \
        --tensor-parallel-size 2

Decodes 256 sequences, 400 tokens each, and has rank 0's GPU wait in every hundredth step: not at
all, then longer in each run. Prints the means of 20 steps each, in ms: all but the ones with a wait
should be as in the run without. The last line is JSON, which --save FILE appends.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench
from nanovllm.cli.options import engine_options

NUM_SEQS, NUM_TOKENS, EACH = 256, 400, 20
PERIOD, FIRST = 100, 20  # which steps wait
WAITS_MS = (0, 0.3, 1, 3, 10, 30, 100)
CYCLES = 1_700_000  # of a GPU's clock in a millisecond: up to 1,980,000


def step_times(llm: LLM, wait_ms: float) -> list[float]:
    """Means of EACH steps of a run, in ms."""
    step, times = llm.core.step, list[float]()

    def timed() -> None:
        if len(times) % PERIOD == FIRST:
            torch.cuda._sleep(int(wait_ms * CYCLES))
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))

    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(20)] for _ in range(NUM_SEQS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.core.step = timed  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.core.step = step  # type: ignore[method-assign]
        llm.reset_prefix_cache()
    return [sum(times[i : i + EACH]) / EACH for i in range(0, NUM_TOKENS, EACH)]


def main() -> None:
    """Run with several waits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device for each rank, PyTorch sees none")
    if engine_options(args).get("tensor_parallel_size", 1) < 2:
        parser.error("needs --tensor-parallel-size of 2 or more")
    with bench.checkpoint(args) as (directory, options), LLM(directory, **options) as llm:
        step_times(llm, 0)  # compiles
        results: dict[str, list[float]] = {}
        for wait_ms in WAITS_MS:
            means = results[str(wait_ms)] = step_times(llm, wait_ms)
            print(f"{wait_ms} ms:", *(f"{mean:.1f}" for mean in means), flush=True)
        result = {"benchmark": "late_rank", "results": results} | harness.conditions(llm)
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
