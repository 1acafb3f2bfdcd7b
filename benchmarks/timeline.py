"""What a timeline costs, and whether it agrees with `metrics()`.

    python benchmarks/timeline.py --dummy qwen3-0.6b [--num-seqs 256] [--repeat 5]

The workload of the bench, run in turns without and with a recording. Prints both rates, by how much
the median with one is lower, and beside each other what the trace and `metrics()` have of the last
run; ends in exit code 1 if they differ by more than 1 %. The last line is JSON, which --save FILE
appends. --output FILE keeps the trace of the last run, for `nanovllm report`.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm.benchmark import harness
from nanovllm.cli import bench
from nanovllm.report.reading import read_trace
from nanovllm.report.summary import Summary

TOLERANCE = 0.01
COUNTERS = (
    *("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_sampled_tokens"),
    *("step_seconds", "num_finished", "num_preemptions", "num_cached_tokens"),
)
TIMES = ("queue_seconds", "first_token_seconds", "total_seconds")


def counted(metrics: dict[str, Any]) -> dict[str, float]:
    """What `metrics()` has, as sums of which two can be subtracted."""
    sums = {name: metrics[name] for name in COUNTERS}
    return sums | {name: (metrics[name]["mean"] or 0) * metrics[name]["count"] for name in TIMES}


def recorded(summary: Summary) -> dict[str, float]:
    """The same by a trace."""
    trace = summary.trace
    return {
        "num_steps": sum(len(each["own"]) for each in trace.engines),
        "num_prefill_tokens": trace.total("prefill_tokens"),
        "num_decode_tokens": trace.total("decode_tokens"),
        "num_sampled_tokens": trace.total("sampled_tokens"),
        "step_seconds": trace.total("own"),
        "num_finished": summary.num_requests("stop", "length"),
        "num_preemptions": trace.total("preempted"),
        "num_cached_tokens": sum(seq["cached_tokens"] for seq in trace.sequences),
        "queue_seconds": float(summary.times("queue_us").sum()),
        "first_token_seconds": float(summary.times("first_token_us").sum()),
        "total_seconds": float(summary.times("total_us").sum()),
    }


def compare(found: dict[str, float], wanted: dict[str, float]) -> float:
    """Print both, and return the largest difference as a share."""
    worst = 0.0
    for name, value in wanted.items():
        difference = abs(found[name] - value) / value if value else float(found[name] != value)
        worst = max(worst, difference)
        print(f"{name:20s} trace {found[name]:14,.4f}  metrics {value:14,.4f}  {difference:.4%}")
    return worst


def main() -> None:
    """Build, run in turns, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    bench.add_options(parser)
    parser.add_argument("--num-seqs", type=bench.positive, default=256, help="sequences (256)")
    parser.add_argument("--repeat", type=bench.positive, default=5, help="timed runs (5)")
    parser.add_argument("--output", type=bench.new_file, help="keep the last trace here")
    args = parser.parse_args()
    llm, _ = bench.build(args)
    prompts, params = harness.workload(args.num_seqs, 0, llm.model_config.vocab_size)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as directory:
        path = args.output or str(Path(directory, "trace.json"))
        for i in range(args.repeat + 1):
            llm.reset_prefix_cache()
            tokens, seconds = harness.run_once(llm, prompts, params, progress=False)
            both = {"off": tokens / seconds}
            llm.reset_prefix_cache()
            before = counted(llm.metrics())
            with llm.trace(path):
                tokens, seconds = harness.run_once(llm, prompts, params, progress=False)
            both["on"] = tokens / seconds
            after = counted(llm.metrics())
            for way, rate in both.items() if i else ():  # the first warms up
                rates[way].append(rate)
        summary, size = Summary(read_trace(path)), Path(path).stat().st_size
    worst = compare(recorded(summary), {name: after[name] - before[name] for name in after})
    medians = {way: statistics.median(each) for way, each in rates.items()}
    for way, each in rates.items():
        print(f"{way}: {medians[way]:.0f} tok/s ({min(each):.0f}–{max(each):.0f})")
    cost = 1 - medians["on"] / medians["off"]
    print(f"recording costs {cost:.2%}; the trace agrees with metrics() within {worst:.4%}")
    result = {
        "benchmark": "timeline",
        "model": bench.model_name(args),
        "num_seqs": args.num_seqs,
        "tok_per_s_off": [round(rate, 1) for rate in rates["off"]],
        "tok_per_s_on": [round(rate, 1) for rate in rates["on"]],
        "cost": round(cost, 4),
        "largest_difference": round(worst, 6),
        "gpu_share": summary.gpu_share,
        "roofline_share_of_steps": summary.roofline_share,
        "trace_bytes": size,
        **harness.conditions(llm),
    }
    llm.exit()
    harness.publish(result, args.save)
    if worst > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main()
