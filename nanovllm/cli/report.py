"""Draw a recorded run as one HTML page.

    nanovllm report trace.json

TRACE is a file recorded by `--trace PATH`, `LLM(model, trace=PATH)` or `with llm.trace(PATH)`. The
page names the bottlenecks and their remedies, and charts throughput, batch and KV pool over time,
and latencies; the command prints its words. The share of the roofline needs the device's limits:
an H200's are known, others are given by --bandwidth and --flops. The page needs
pip install "plotly>=6"; without it the command prints the words and exits with code 2.
"""

import argparse
from pathlib import Path

from nanovllm.cli.options import new_file, rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("trace", metavar="TRACE", help="the recorded file")
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        help="the page (the trace's name with .html)",
    )
    parser.add_argument("--bandwidth", type=rate, help="limit of one device, bytes per second")
    parser.add_argument("--flops", type=rate, help="limit of one device, operations per second")


def run(args: argparse.Namespace) -> int:
    """Read the trace, print its summary, and draw the page."""
    from nanovllm.report.reading import read_trace
    from nanovllm.report.summary import Summary
    from nanovllm.report.words import in_words

    source = Path(args.trace)
    output = Path(args.output) if args.output is not None else source.with_suffix(".html")
    if output == source:
        raise ValueError(f"--output must be another file than the trace, got {args.output!r}")
    summary = Summary(read_trace(args.trace), args.bandwidth, args.flops)
    print(in_words(summary), flush=True)  # even if the page fails
    try:
        from nanovllm.report.page import page
    except ImportError as error:
        raise ValueError(f'the page needs plotly ({error}): pip install "plotly>=6"') from None
    try:
        output.write_text(page(summary, source.name), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output cannot be written: {error}") from None
    print(f"\n{output}")
    return 0
