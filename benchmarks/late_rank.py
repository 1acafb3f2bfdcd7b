"""What a step of several GPUs costs after one of them was late.

    python benchmarks/late_rank.py --dummy qwen3-8b --quantization fp8 --tensor-parallel-size 2

Decodes 256 sequences, 400 tokens each, and has rank 0's GPU wait in every hundredth step, for a
while longer in each run. Prints the means of 20 steps each, in ms: all but the ones with a wait
should be as in the run without.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.cli import bench

NUM_SEQS, NUM_TOKENS, EACH = 256, 400, 20
CYCLES = 1_700_000  # of a GPU's clock in a millisecond, about


def step_times(llm: LLM, wait_ms: float) -> list[float]:
    """Milliseconds of each step of a run."""
    step, times = llm.core.step, list[float]()

    def timed() -> None:
        if len(times) % 100 == EACH:
            torch.cuda._sleep(int(wait_ms * CYCLES))
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))

    prompts = [[random.randrange(10000) for _ in range(20)] for _ in range(NUM_SEQS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.core.step = timed  # type: ignore[method-assign]
    llm.generate(prompts, params, use_tqdm=False)
    llm.core.step = step  # type: ignore[method-assign]
    return times


def main() -> None:
    """Run with several waits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device for each rank, PyTorch sees none")
    with bench.checkpoint(args) as (directory, options), LLM(directory, **options) as llm:
        for wait_ms in (0, 0.3, 1, 3, 10, 30):
            times = step_times(llm, wait_ms)
            means = [sum(times[i : i + EACH]) / EACH for i in range(0, NUM_TOKENS, EACH)]
            print(f"{wait_ms} ms:", *(f"{mean:.1f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
