"""Draw a recorded run as one HTML page.

    nanovllm report trace.json

The trace is what `--trace PATH`, `LLM(model, trace=PATH)` or `with llm.trace(PATH)` has recorded.
The page has throughput, batch and KV pool over time, latencies, and in words what held the run
back; the words are printed, too. The share of the roofline needs the device's limits: those of an
H200 are known, others are given by --bandwidth and --flops. Needs pip install "plotly>=6".
"""

import argparse
from pathlib import Path

from nanovllm.cli.options import new_file, rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("trace", metavar="TRACE", help="the recorded file")
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        help="the page (the trace's name with .html)",
    )
    parser.add_argument("--bandwidth", type=rate, help="one device's limit, bytes per second")
    parser.add_argument("--flops", type=rate, help="its limit, operations per second")


def run(args: argparse.Namespace) -> int:
    """Read, sum up, draw."""
    from nanovllm.report.reading import read_trace
    from nanovllm.report.summary import Summary

    source = Path(args.trace)
    output = Path(args.output) if args.output is not None else source.with_suffix(".html")
    if output == source:
        raise ValueError(f"--output must be another file than the trace, got {args.output!r}")
    summary = Summary(read_trace(args.trace), args.bandwidth, args.flops)
    try:
        from nanovllm.report.page import in_words, page
    except ImportError as error:
        raise ValueError(f'drawing needs plotly ({error}): pip install "plotly>=6"') from error
    try:
        output.write_text(page(summary, source.name), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output cannot be written: {error}") from error
    print(in_words(summary))
    print(f"\n{output}")
    return 0
