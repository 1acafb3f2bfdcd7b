"""What a job over a file costs: `nanovllm.batch`, from file to file, beside `generate`.

    python benchmarks/job_overhead.py --dummy qwen3-0.6b [--num-seqs 256] [--repeat 3]

The workload of the bench, with random tokens as prompts: `generate` has them in memory, the job
reads them from a file of JSON lines and writes and syncs one with the results. They take turns.
Prints both, median and range, and by how much the median of the job is longer; the last line is
JSON, which --save FILE appends.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.batch import ResumableSink, read_rows, run
from nanovllm.benchmark import harness
from nanovllm.cli import bench


def write_rows(path: Path, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    """The workload as a file."""
    names = ("temperature", "max_tokens", "ignore_eos")
    with path.open("w", encoding="utf-8") as file:
        for prompt, own in zip(prompts, params, strict=True):
            row = {"prompt_token_ids": prompt, **{name: getattr(own, name) for name in names}}
            file.write(json.dumps(row) + "\n")


def time_job(llm: LLM, directory: Path) -> float:
    """Seconds from the call to the end, when the disk holds all results."""
    output = directory / "out.jsonl"
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    with ResumableSink(output) as sink:
        for result in run(llm, sink.unfinished(read_rows(directory / "in.jsonl"))):
            sink.write(result)
    assert not sink.num_errors, "rows of the workload were refused"
    return time.perf_counter() - start


def main() -> None:
    """Build, warm up, time both in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    bench.add_options(parser)
    parser.add_argument("--num-seqs", type=bench.positive, default=256, help="rows (256)")
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    args = parser.parse_args()
    llm, _ = bench.build(args)
    prompts, params = harness.workload(args.num_seqs, 0, llm.model_config.vocab_size)
    seconds: dict[str, list[float]] = {"generate": [], "job": []}
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name, "in.jsonl"), prompts, params)
        for i in range(args.repeat + 1):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times = {"generate": time.perf_counter() - start}
            llm.reset_prefix_cache()
            times["job"] = time_job(llm, Path(name))
            for way, taken in times.items() if i else ():  # the first warms up
                seconds[way].append(taken)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    for way, each in seconds.items():
        print(f"{way}: {medians[way]:.3f} s ({min(each):.3f}–{max(each):.3f})")
    overhead = medians["job"] / medians["generate"] - 1
    print(f"the job takes {overhead:+.2%} longer")
    result = {
        "benchmark": "job_overhead",
        "model": bench.model_name(args),
        "num_seqs": args.num_seqs,
        "generate_s": seconds["generate"],
        "job_s": seconds["job"],
        "overhead": round(overhead, 4),
        **harness.conditions(llm),
    }
    llm.exit()
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
