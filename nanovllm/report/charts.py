"""The charts of a report: curves over time, and latency distributions. Needs plotly.

Colours of text and lines are the page's, light or dark (`page.py`).
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nanovllm.report.bins import Bins
from nanovllm.report.findings import host_shares, percent
from nanovllm.report.reading import Floats
from nanovllm.report.summary import Summary
from nanovllm.report.words import duration

NUM_BARS = 40
BLUE, ORANGE, GREEN, RED = "#4c7fe0", "#e08a3c", "#3fa06a", "#d0504c"
PURPLE, TEAL, GREY = "#9166cc", "#35a3b5", "#8d949e"
PHASES = {"schedule": BLUE, "launch": ORANGE, "book": GREEN, "between": PURPLE, "wait": GREY}
HELD_BY = {
    "blocks": ("no free KV blocks", RED),
    "sequences": ("max_num_seqs reached", BLUE),
    "tokens": ("max_num_batched_tokens reached", ORANGE),
    "prefix": ("shared prefix being computed", TEAL),
}
TIMES = {
    "queue_us": ("Queue time", GREY),
    "first_token_us": ("Time to first token (TTFT)", ORANGE),
    "token_us": ("Time per output token (TPOT)", BLUE),
    "total_us": ("End-to-end latency", GREEN),
}


class Chart(NamedTuple):
    """A figure with its words.

    Attributes:
        name: id of the element in the page.
        title: heading of the chart.
        text: explanation for the reader.
        figure: figure of plotly; its height is that of the element.
    """

    name: str
    title: str
    text: str
    figure: Any


def charts(summary: Summary) -> list[Chart]:
    """All charts for which the trace has data, in the order of the page."""
    drawn = [throughput, sequences, pool, waiting, host, roofline, latencies, replicas]
    found = (draw(summary) for draw in drawn)
    return [chart for chart in found if chart is not None]


# -- over time -------------------------------------------------------------------------------------


def throughput(summary: Summary) -> Chart:
    """Tokens per second."""
    bins = Bins(summary.trace)
    figure = _over_time("generated tokens / s", "prefill tokens / s")
    _area(figure, bins, bins.rates("sampled_tokens"), "generated", BLUE)
    _area(figure, bins, bins.rates("prefill_tokens"), "prefill", ORANGE, row=2)
    text = "Tokens per second: generated tokens above, computed prompt tokens (prefill) below."
    return Chart("throughput", "Throughput", text, figure)


def sequences(summary: Summary) -> Chart:
    """Running and waiting sequences."""
    bins = Bins(summary.trace)
    most = summary.facts["max_num_seqs"] * len(summary.trace.engines)
    running, waits = bins.levels("running"), bins.levels("waiting")
    figure = _over_time(*("running", "waiting")[: 1 + bool(waits.any())])
    _area(figure, bins, running, "running", BLUE)
    is_near = most <= 4 * running.max()
    _count_whole(figure, most if is_near else running.max(), row=1)
    if is_near:
        line = {"color": GREY, "dash": "dot", "width": 1.5}
        ends = [0, float(bins.edges[-1])]
        limit = go.Scatter(x=ends, y=[most, most], name="max_num_seqs", mode="lines", line=line)
        figure.add_trace(limit, row=1, col=1)
    text = f"Running sequences (max_num_seqs: {most:,}). "
    if waits.any():
        _area(figure, bins, waits, "waiting", ORANGE, row=2)
        _count_whole(figure, waits.max(), row=2)
        text += f"Below, waiting sequences, and why the first had to wait: {_reasons(summary)}."
    else:
        text += "None waited."
    return Chart("sequences", "Batch occupancy", text, figure)


def _reasons(summary: Summary) -> str:
    """The reasons why the first in the queue waited, with shares of the waiting time, largest
    first.
    """
    engines, seconds = summary.trace.engines, dict[str, float]()
    for reason, (name, _) in HELD_BY.items():
        seconds[name] = sum(
            float(each["seconds"][each.held_by == reason].sum()) for each in engines
        )
    total = sum(seconds.values())
    names = sorted(filter(seconds.get, seconds), key=lambda name: -seconds[name])
    return ", ".join(f"{name} ({percent(seconds[name] / total)})" for name in names)


def pool(summary: Summary) -> Chart:
    """KV blocks in use, and preemptions."""
    engines, bins = summary.trace.engines, Bins(summary.trace)
    figure = _over_time("share of the blocks", share=True)
    used = [each["used_blocks"] / each.num_blocks * each["seconds"] for each in engines]
    _area(figure, bins, bins.shares(used), "in use", GREEN)
    preempted = bins.sums(bins.column("preempted"))
    some = preempted >= 0.5
    num_blocks, size = engines[0].num_blocks, summary.facts["kvcache_block_size"]
    text = f"KV blocks held by sequences, out of {num_blocks:,} blocks of {size} tokens"
    text += " per replica." if len(engines) > 1 else "."
    if some.any():
        marker = {"color": RED, "size": np.minimum(6 + 3 * np.sqrt(preempted[some]), 18)}
        marks = go.Scatter(x=bins.times[some], y=np.ones(some.sum()), mode="markers", marker=marker)
        marks.update(name="preemptions", customdata=preempted[some].round())
        figure.add_trace(marks.update(hovertemplate="%{customdata}"), row=1, col=1)
        text += " Red: preemptions."
    return Chart("pool", "KV pool", text, figure)


def waiting(summary: Summary) -> Chart | None:
    """The reasons why the first in the queue waited, over time."""
    engines, bins = summary.trace.engines, Bins(summary.trace)
    figure = _over_time("share of the time", share=True)
    for reason, (name, color) in HELD_BY.items():
        seconds = [each["seconds"] * (each.held_by == reason) for each in engines]
        if summary.share(seconds) > 0:
            _area(figure, bins, bins.shares(seconds), name, color, stackgroup="all")
    text = "The reason why the first request in the queue had to wait; empty where none waited."
    return Chart("waiting", "Reasons for waiting", text, figure) if figure.data else None


def host(summary: Summary) -> Chart:
    """The work of the host over time, and the GPU's."""
    bins = Bins(summary.trace)
    figure, shares = _over_time("share of the time", share=True), host_shares(summary)
    did = {name: bins.shares(bins.column(name)) for name in PHASES if name != "between"}
    known = np.sum(list(did.values()), 0)  # over 1 if a step was launched before its time began
    did = {name: share / np.maximum(known, 1) for name, share in did.items()}
    did["between"] = np.maximum(1 - known, 0)
    for name, color in PHASES.items():
        _area(figure, bins, did[name], f"{name} {shares[name]:.0%}", color, stackgroup="all")
    text = (
        "The host's time: scheduling a step, launching it, waiting for the device, booking its "
        "tokens, and anything else between two steps."
    )
    if summary.gpu_share is None:
        text += " On a CPU, the launch computes the step."
    else:
        busy, name = bins.shares(bins.column("gpu")), f"GPU busy {summary.gpu_share:.0%}"
        line = {"color": RED, "width": 2}
        figure.add_trace(go.Scatter(x=bins.times, y=np.minimum(busy, 1), name=name, line=line))
        text += " Red line: the share of the time that the GPU was busy."
    return Chart("host", "Host and device", text, figure)


def roofline(summary: Summary) -> Chart | None:
    """The least time of steps, over their time."""
    if summary.least_seconds is None:
        return None
    bins, figure = Bins(summary.trace), _over_time("share of the roofline", share=True)
    _area(figure, bins, bins.shares(summary.least_seconds), "share of the roofline", PURPLE)
    text = (
        "The least time that the device's limits allow for each step (one read of weights, keys "
        "and values, or its arithmetic), divided by the time that it took."
    )
    return Chart("roofline", "Share of the roofline", text, figure)


def replicas(summary: Summary) -> Chart | None:
    """The throughput of each replica."""
    engines, bins = summary.trace.engines, Bins(summary.trace)
    if len(engines) < 2:
        return None
    figure, colors = _over_time("generated tokens / s"), (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED)
    for i, engine in enumerate(engines):
        rates = bins.spread(engine, engine["sampled_tokens"]) / bins.width
        line = {"color": colors[i % len(colors)], "width": 1.8}
        figure.add_trace(go.Scatter(x=bins.times, y=rates, name=engine.name, line=line))
    text = "Generated tokens per second of each replica. One that ends early had less to do."
    return Chart("replicas", "Replicas", text, figure)


# -- distributions ---------------------------------------------------------------------------------


def latencies(summary: Summary) -> Chart | None:
    """Histograms of the latencies, on logarithmic axes."""
    spreads = {key: summary.times(key) for key in TIMES}
    if not len(spreads["total_us"]):
        return None
    titles = [f"{name}{_median(spreads[key])}" for key, (name, _) in TIMES.items()]
    figure = make_subplots(2, 2, subplot_titles=titles, vertical_spacing=0.24)
    for i, (key, (name, color)) in enumerate(TIMES.items()):
        values = spreads[key]
        edges = log_edges(values)
        counts = np.histogram(np.maximum(values, edges[0]), edges)[0]
        middles, at = np.log10(edges[1:] * edges[:-1]) / 2, {"row": i // 2 + 1, "col": i % 2 + 1}
        spans = [f"{duration(a)} to {duration(b)}" for a, b in pairwise(edges)]
        bars = go.Bar(x=middles, y=counts, marker={"color": color}, name=name, customdata=spans)
        figure.add_trace(bars.update(hovertemplate="%{y}: %{customdata}<extra></extra>"), **at)
        ticks = round_values(*edges[[0, -1]])
        labels = [duration(value) for value in ticks]
        figure.update_xaxes(tickvals=np.log10(ticks), ticktext=labels, **at)
        figure.update_yaxes(rangemode="tozero", nticks=4, **at)
        _count_whole(figure, counts.max(), **at)
    figure.update_yaxes(title="requests", col=1)
    figure.update_annotations(font_size=13)
    figure.update_layout(_layout(500), showlegend=False, bargap=0)
    text = "Histograms on logarithmic axes, each with its median in the heading."
    return Chart("latencies", "Latencies", text, figure)


def _median(values: Floats) -> str:
    return f": {duration(float(np.median(values)))}" if len(values) else ""


def log_edges(values: Floats) -> Floats:
    """[NUM_BARS + 1] edges of bars of equal width in logarithms, over all values; zeros are in the
    first bar.
    """
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1e-3, 1.0)
    margin = max(1.02, math.sqrt(1.5 / (high / low)))
    return np.geomspace(low / margin, high * margin, NUM_BARS + 1)


def round_values(low: float, high: float) -> list[float]:
    """Two to five round values between these bounds."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        values = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [value for value in values if low <= value <= high]
        if len(found) <= 5:
            break
    return found[:: -(-len(found) // 5)] if len(found) > 1 else [low * 1.02, high / 1.02]


# -- plotly ----------------------------------------------------------------------------------------


def _over_time(*titles: str, share: bool = False) -> Any:
    """Charts over one time axis, one below another; `share` gives their axes in percent."""
    figure = make_subplots(len(titles), 1, shared_xaxes=True, vertical_spacing=0.1)
    figure.update_layout(_layout(190 + 110 * len(titles)), hovermode="x unified")
    for row, title in enumerate(titles, 1):
        figure.update_yaxes(title=title, rangemode="tozero", nticks=6, row=row)
    figure.update_xaxes(title="seconds since the first step", row=len(titles))
    figure.update_xaxes(hoverformat=".4~g", rangemode="tozero")
    if share:
        figure.update_yaxes(tickformat=".0%", range=[0, 1.06])
    return figure


def _count_whole(figure: Any, most: float, **at: int) -> None:
    """Have no ticks between integers: plotly has some on an axis that ends below seven."""
    if most < 7:
        figure.update_yaxes(dtick=1, **at)


def _layout(height: int) -> dict[str, Any]:
    return {
        "template": go.layout.Template(),
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 36, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
    }


def _area(
    figure: Any, bins: Bins, values: Floats, name: str, color: str, row: int = 1, **more: Any
) -> None:
    line = {"color": color, "width": 1.5}
    area = go.Scatter(x=bins.times, y=values, name=name, mode="lines", line=line, fill="tozeroy")
    if "stackgroup" in more:
        area.fill = None
    figure.add_trace(area.update(fillcolor=_faint(color), **more), row=row, col=1)


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"
