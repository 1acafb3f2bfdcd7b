"""Draw what `workloads.py`, `bench.py` or `page.py` saved beside peers and the roofline.

    pip install -e ".[bench]"
    python benchmarks/workloads.py --dummy qwen3-0.6b --save results.jsonl
    python benchmarks/plot.py results.jsonl [--output docs/benchmarks.png]

A panel for each model that both the files and `peers.json` have, with the workloads of `ROWS`; of
several results for a workload the last counts, and none with quantised weights or KV cache, which
the peers were not measured with. Bars are shares of the roofline, the figures are
those measured: our median, and of a peer that was measured several times its best.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

try:
    import matplotlib
except ImportError:
    sys.exit('matplotlib is missing: pip install -e ".[bench]"')

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).with_name("peers.json")
COLOURS = {
    "nano-vLLM": "#b8bcc4",
    "SGLang 0.5.17": "#93a88f",
    "vLLM 0.26": "#6f7d95",
    "nanovllm (this library)": "#d9622b",
}
OURS = list(COLOURS)[-1]
ROWS = {  # of the picture, from top to bottom
    "bench-0": "bench",
    "bs1": "one sequence",
    "prefill": "prefill",
    "shared-prefix": "shared\nprefix",
    "wide": "short\nprompts",
}
FULL_BENCH = 256  # sequences of the bench that the peers ran


class Bar(NamedTuple):
    """One engine on one workload."""

    share: float  # of the roofline
    label: str


def results_of(record: dict[str, Any]) -> dict[str, Any]:
    """Workload -> result, of a line that `workloads.py` or `bench.py` saved.

    Empty for other benchmarks, and where weights or KV cache are quantised.
    """
    if record["quantization"] != "none" or record["kv_cache_dtype"] != record["dtype"]:
        return {}
    if record["benchmark"] == "workloads":
        return record["results"]
    if record["benchmark"] != "bench" or record["num_seqs"] != FULL_BENCH:
        return {}
    result = {"median": record["tok_per_s_median"], "unit": "tok/s"}
    return {f"bench-{record['seed']}": {**result, "roofline_share": record["roofline_share"]}}


def read_results(files: list[str], hardware: str) -> dict[str, dict[str, Any]]:
    """Model -> workload of `ROWS` -> result. ValueError for other hardware than the peers'."""
    models: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "error" in entry:  # of page.py, which keeps a record beside its command
                continue
            record = entry.get("record", entry)
            results = results_of(record)
            if not results:
                continue
            if record["hardware"] != hardware:
                raise ValueError(
                    f"{file}: results must be of the peers' hardware, {hardware}, "
                    f"got {record['hardware']}"
                )
            models.setdefault(record["model"], {}).update(results)
    return {
        model: {name: results[name] for name in ROWS if name in results}
        for model, results in models.items()
    }


def bars(
    results: dict[str, Any], peers: dict[str, dict[str, list[float]]]
) -> dict[str, list[Bar | None]]:
    """Engine -> a bar for each workload of `results`; None where a peer has no figure."""
    drawn: dict[str, list[Bar | None]] = {engine: [] for engine in (*peers, OURS)}
    for name, result in results.items():
        rated, ours = result["unit"] == "tok/s", result["median"]
        for engine, row in drawn.items():
            figures = [ours] if engine == OURS else peers[engine].get(name)
            if figures is None:
                row.append(None)
                continue
            value = max(figures) if rated else min(figures)
            speed = value / ours if rated else ours / value  # relative to ours
            row.append(Bar(result["roofline_share"] * speed, write(value, rated)))
    return drawn


def write(value: float, rated: bool) -> str:
    """A figure as short as it is read."""
    if not rated:
        return f"{value:.2f}"
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def draw(
    axes: Axes, title: str, results: dict[str, Any], drawn: dict[str, list[Bar | None]]
) -> None:
    """One model's bars: a group for each workload, from top to bottom."""
    height, units = 0.84 / len(drawn), [result["unit"] for result in results.values()]
    for i, (engine, row) in enumerate(drawn.items()):
        for y, bar in enumerate(row):
            if bar is None:
                continue
            at = y + (i - (len(drawn) - 1) / 2) * height
            axes.barh(at, bar.share, 0.92 * height, color=COLOURS[engine])
            label = f"{bar.label} {units[y]}"
            fits_within = bar.share > 0.75  # beside the bar it would meet the line at 100 %
            axes.text(
                bar.share + (-0.015 if fits_within else 0.015),
                at,
                label,
                ha="right" if fits_within else "left",
                va="center",
                fontsize=8,
                color="white" if fits_within else "black",
            )
    axes.axvline(1.0, color="#2b2f36", linewidth=1, linestyle="--")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks(range(len(results)), [ROWS[name] for name in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0, 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", help="results that workloads.py or bench.py saved")
    parser.add_argument(
        "--output", default=str(ROOT / "docs" / "benchmarks.png"), help="the picture to write"
    )
    args = parser.parse_args()
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    figures = peers["figures"]
    try:
        models = read_results(args.files, peers["hardware"])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    shown = [model for model in figures if model in models]
    if not shown:
        parser.error(f"no model of {sorted(models)} is in {PEERS.name}: {sorted(figures)}")
    most = max(len(models[model]) for model in shown)
    size = 0.6 + 3.7 * len(shown), 0.9 + 0.85 * most
    figure, columns = plt.subplots(1, len(shown), squeeze=False, figsize=size)
    for axes, model in zip(columns[0], shown, strict=True):
        draw(axes, f"{model} shape", models[model], bars(models[model], figures[model]))
    figure.suptitle(f"Share of the roofline of one {peers['hardware']}", fontsize=11)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles, list(COLOURS), loc="lower center", ncols=len(COLOURS), frameon=False, fontsize=9
    )
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(args.output, dpi=160, facecolor="white")  # white is readable on dark pages too
    print(args.output)


if __name__ == "__main__":
    main()
