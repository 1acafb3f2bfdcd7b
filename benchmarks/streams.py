"""The cost of tokens as they come: `LLM.stream`, `AsyncLLM.stream` and `AsyncLLM.generate` beside
`LLM.generate`.

    python benchmarks/streams.py --dummy qwen3-0.6b [--num-requests 1 256] [--only async-stream]

The first so many requests of the bench, with outputs cut at --max-tokens, all at once. One engine
runs them in each way, in turns, after one run without a clock. `AsyncLLM` has a task for each
request, in one event loop. Prints for each number of requests and each way tokens per second,
median and range, and the share of what `generate` has: the median over the turns. The last line is
JSON, which --save FILE appends to FILE.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench

Prompts = list[list[int]]
Params = list[SamplingParams]
Counts = list[int]  # generated tokens of each request


def generate(llm: LLM, prompts: Prompts, params: Params) -> Counts:
    """`LLM.generate`."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


def stream(llm: LLM, prompts: Prompts, params: Params) -> Counts:
    """`LLM.stream`."""
    counts: dict[int, int] = {}
    for output in llm.stream(prompts, params):
        before = counts.get(output.request_id, 0)
        counts[output.request_id] = before + len(output.outputs[0].token_ids)
    return [counts[request_id] for request_id in sorted(counts)]


async def one_stream(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> int:
    """A task's `AsyncLLM.stream`."""
    count = 0
    async for output in llm.stream(prompt, params):
        count += len(output.outputs[0].token_ids)
    return count


async def one_generate(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> int:
    """A task's `AsyncLLM.generate`."""
    async for output in llm.generate(prompt, params):
        last = output
    return len(last.outputs[0].token_ids)


Way = Callable[[AsyncLLM, Prompts, Params], Awaitable[Counts]]


def in_engine(way: Callable[[LLM, Prompts, Params], Counts]) -> Way:
    """Run a workload in the engine's thread alone."""

    async def run(llm: AsyncLLM, prompts: Prompts, params: Params) -> Counts:
        return await llm._call(lambda engine: way(engine, prompts, params))

    return run


def in_tasks(way: Callable[[AsyncLLM, list[int], SamplingParams], Awaitable[int]]) -> Way:
    """Run a workload with one task per request."""

    async def run(llm: AsyncLLM, prompts: Prompts, params: Params) -> Counts:
        return await asyncio.gather(*map(partial(way, llm), prompts, params))

    return run


BASE = "generate"
WAYS: dict[str, Way] = {
    BASE: in_engine(generate),
    "stream": in_engine(stream),
    "async-stream": in_tasks(one_stream),
    "async-generate": in_tasks(one_generate),
}


async def rate(llm: AsyncLLM, way: str, prompts: Prompts, params: Params) -> float:
    """Tokens per second of one run."""
    await llm._call(LLM.reset_prefix_cache)
    start = time.perf_counter()
    counts = await WAYS[way](llm, prompts, params)
    seconds = time.perf_counter() - start
    wanted = harness.num_new_tokens(params)
    if counts != wanted:
        raise RuntimeError(f"{way}: {sum(counts)} tokens instead of {sum(wanted)}")
    return sum(counts) / seconds


async def measure(llm: AsyncLLM, args: argparse.Namespace) -> dict[str, Any]:
    """All rates, by number of requests and way."""
    ways = [way for way in WAYS if way == BASE or way in args.only]
    vocab_size = await llm._call(lambda engine: engine.model_config.vocab_size)
    results: dict[str, Any] = {}
    for count in args.num_requests:
        prompts, drawn = harness.workload(count, 0, vocab_size)
        params = [
            replace(each, max_tokens=min(args.max_tokens, each.max_tokens or 0)) for each in drawn
        ]
        await rate(llm, BASE, prompts, params)  # warm-up
        turns = [
            {way: await rate(llm, way, prompts, params) for way in ways} for _ in range(args.repeat)
        ]
        results[str(count)] = {way: result_of(turns, way) for way in ways}
        for way, result in results[str(count)].items():
            low, high = result["runs"][0], result["runs"][-1]
            line = f"{count:5d} {way:15s} {result['median']:9.0f} tok/s ({low:.0f}–{high:.0f})"
            print(f"{line}, {result['share']:.3f} of {BASE}", flush=True)
    return results


def result_of(turns: list[dict[str, float]], way: str) -> dict[str, Any]:
    """A way's rates, and its share of `generate` in the same turn."""
    rates = sorted(turn[way] for turn in turns)
    share = statistics.median(turn[way] / turn[BASE] for turn in turns)
    return {
        "median": round(statistics.median(rates), 1),
        "runs": [round(each, 1) for each in rates],
        "unit": "tok/s",
        "share": round(share, 4),
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build, measure, and say on what."""
    with bench.checkpoint(args) as (directory, options):
        llm = AsyncLLM(directory, **options)
    async with llm:
        results = await measure(llm, args)
        conditions = await llm._call(harness.conditions)
    return {
        "benchmark": "streams",
        "model": bench.model_name(args),
        "max_tokens": args.max_tokens,
        "results": results,
        **conditions,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument(
        "--num-requests",
        nargs="+",
        type=bench.positive,
        default=[1, 16, 64, 256, 512],
        help="at once (1 16 64 256 512)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[way for way in WAYS if way != BASE],
        default=list(WAYS),
        help=f"ways beside {BASE} (all)",
    )
    parser.add_argument(
        "--max-tokens", type=bench.positive, default=1024, help="of an output (1024)"
    )
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    args = parser.parse_args()
    harness.publish(asyncio.run(run(args)), args.save)


if __name__ == "__main__":
    main()
