"""The report as one HTML page, with plotly.js and all data in it: it loads nothing."""

import html
import json
import re
import time
from collections.abc import Iterable

import numpy as np
from plotly.offline import get_plotlyjs

from nanovllm.report.charts import Chart, charts, duration
from nanovllm.report.findings import NOTHING, Finding, find, percent
from nanovllm.report.summary import PERCENTILES, Summary

STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --soft: #5a6272; --line: #dde1e8; --grid: #e6e9ef;
  --page: #f6f7f9; --card: #ffffff; --accent: #2f62c9; --warn: #b4432f; --good: #2b7d51; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ee; --soft: #a3abba; --line: #343a46;
  --grid: #2d333e; --page: #15181e; --card: #1d2129; --accent: #7fa6f5; --warn: #f08a72;
  --good: #6cc795; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 40px 0 12px; }
h3 { font-size: 1.05rem; margin: 0 0 6px; }
p { margin: 0 0 8px; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--page);
  border: 1px solid var(--line); border-radius: 4px; padding: 0 4px; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 0 0 14px; }
.finding { border-left: 4px solid var(--warn); }
.finding.fine { border-left-color: var(--good); }
.finding .share { float: right; font-weight: 600; color: var(--warn); }
.finding.fine .share { display: none; }
.finding h3::first-letter { text-transform: uppercase; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }
.figures .card { margin: 0; padding: 12px 14px; }
.figures .value { font-size: 1.15rem; font-weight: 600; white-space: nowrap; }
.figures .name, .figures .more { color: var(--soft); font-size: 0.88rem; line-height: 1.4; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 0 4px 24px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; }
.plot { width: 100%; }
@media (max-width: 560px) { main { padding: 20px 10px 48px; } .card { padding: 12px 10px; }
  .figures { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  table { font-size: 0.86rem; } th, td { padding-left: 10px; } }
"""

SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue(name).trim();
  const font = {color: color("--ink"), size: 12, family: "system-ui, sans-serif"};
  const label = {bgcolor: color("--card"), bordercolor: color("--line"), font: font};
  const found = {...layout, font: font, hoverlabel: label};
  for (const key of Object.keys(found)) {
    if (/^[xy]axis/.test(key)) {
      found[key] = {...found[key], gridcolor: color("--grid"), linecolor: color("--line"),
        zerolinecolor: color("--line"), automargin: true};
    }
  }
  return found;
}
function draw() {
  for (const [name, figure] of Object.entries(FIGURES)) {
    const options = {responsive: true, displayModeBar: false};
    Plotly.react(name, figure.data, themed(figure.layout), options);
  }
}
draw();
dark.addEventListener("change", draw);
"""


def page(summary: Summary, source: str) -> str:
    """The page.

    Args:
        source: the trace's name, for its reader.
    """
    drawn = charts(summary)
    title = f"A run of {summary.facts['model']}, {duration(summary.trace.seconds)}"
    figures = ",".join(f"{json.dumps(each.name)}:{each.figure.to_json()}" for each in drawn)
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
            f"<script>{get_plotlyjs()}</script></head><body><main>",
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="soft">{html.escape(subtitle(summary))}</p>',
            *(f'<p class="card">{html.escape(each)}</p>' for each in warnings(summary)),
            "<h2>What held the run back</h2>",
            *map(_finding, find(summary)),
            *(f'<p class="soft">{_words(each)}</p>' for each in unknown(summary)),
            "<h2>In figures</h2>",
            '<div class="figures">',
            *(_figure(*each) for each in key_figures(summary)),
            "</div>",
            _latency_table(summary),
            "<h2>Over time</h2>",
            '<p class="soft">Drag across a chart to zoom in, double-click to zoom out; a click on '
            "a name in a legend hides it.</p>",
            *map(_chart, drawn),
            f'<p class="soft">Drawn by <code>nanovllm report</code> from {html.escape(source)}, '
            "which https://ui.perfetto.dev shows step by step.</p>",
            f"</main><script>const FIGURES = {{{figures}}};{SCRIPT}</script></body></html>",
        ]
    )


def subtitle(summary: Summary) -> str:
    """What ran, on what, and when."""
    facts, count = summary.facts, len(summary.trace.engines)
    what = f"{facts['architecture']}, {facts['dtype']}"
    if facts["quantization"] not in ("none", facts["dtype"]):
        what += f" ({facts['quantization']} weights)"
    size = facts["tensor_parallel_size"]
    where = f"{count} replicas of " if count > 1 else ""
    where += f"{size} × " if size > 1 else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["wall_clock"]))
    return f"{what}, on {where}{facts['device_name']}, recorded on {when}"


def warnings(summary: Summary) -> list[str]:
    """What is missing."""
    trace, found = summary.trace, []
    if trace.is_full:
        found.append(
            f"The trace's file was full after {duration(trace.seconds)}: what came later is not in "
            "this report. A part of a long run is recorded by `with llm.trace(path):`."
        )
    if not trace.has_ended:
        found.append("The recording has no end: its process was killed, or is still running.")
    return found


def unknown(summary: Summary) -> list[str]:
    """What cannot be said, and why."""
    found, name = [], summary.facts["device_name"]
    if summary.gpu_share is None:
        found.append(
            "The device is a CPU, which is the host as well: whether the host held the run back "
            "cannot be told."
        )
    if summary.least_seconds is None:
        found.append(
            f"The limits of this device ({name}, {summary.facts['dtype']}) are not known, so there "
            "is no share of the roofline: `--bandwidth` and `--flops` say them."
        )
    return found


def key_figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Value, name, and what belongs to it."""
    trace, facts = summary.trace, summary.facts
    seconds, busy, generated = trace.seconds, summary.busy_seconds, trace.total("sampled_tokens")
    prompts, steps = trace.total("prefill_tokens"), sum(len(e["seconds"]) for e in trace.engines)
    done, left = summary.num_requests("stop", "length"), summary.num_requests("unfinished")
    more = [f"{left:,} unfinished"] * (left > 0)
    more += [f"{count:,} aborted" for count in [summary.num_requests("aborted")] if count]
    found = [
        (f"{generated / seconds:,.0f} tok/s", "generated", f"{generated:,.0f} tokens"),
        (f"{prompts / seconds:,.0f} tok/s", "of prompts", f"{prompts:,.0f} tokens computed"),
        (f"{done:,}", f"request{'s' * (done != 1)} finished", ", ".join(more)),
        (
            duration(seconds),
            "from first to last step",
            f"with requests {percent(min(1.0, busy / seconds / len(trace.engines)))}",
        ),
        (f"{steps:,}", f"step{'s' * (steps != 1)}", f"{duration(trace.total('own') / steps)} each"),
        (f"{summary.mean('running'):,.1f}", "sequences at once", f"of {facts['max_num_seqs']:,}"),
        (percent(summary.peak_pool_share), "of the KV pool at most", _pool(summary)),
        (percent(summary.hit_rate), "of prompts' tokens cached", ""),
    ]
    preempted = trace.total("preempted")
    again = f"{summary.num_repeated_tokens:,} tokens again" if preempted else ""
    found.append((f"{preempted:,.0f}", "preemptions", again))
    if summary.gpu_share is not None:
        found.append((percent(summary.gpu_share), "of the time the GPU computed", ""))
    if summary.roofline_share is not None:
        found.append((percent(summary.roofline_share), "of the roofline", "of these steps"))
    return found


def _pool(summary: Summary) -> str:
    return (
        f"{summary.trace.engines[0].num_blocks:,} blocks of {summary.facts['kvcache_block_size']}"
    )


def in_words(summary: Summary) -> str:
    """The report without its charts."""
    lines = [f"{subtitle(summary)}", *warnings(summary)]
    lines += [
        f"{value} {name}{f' ({more})' if more else ''}"
        for value, name, more in key_figures(summary)
    ]
    for each in find(summary):
        share = f" ({percent(each.share)} of the time)" if each.cause != NOTHING else ""
        lines += ["", f"held back by {each.cause}{share}", each.text, each.remedy]
    return "\n".join([*lines, *unknown(summary)])


# -- parts -----------------------------------------------------------------------------------------


def _words(text: str) -> str:
    """Text for HTML, in which names of options stand between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _finding(finding: Finding) -> str:
    fine = finding.cause == NOTHING
    title = "Nothing did" if fine else finding.cause
    return (
        f'<div class="card finding{" fine" if fine else ""}" data-cause="{finding.cause}">'
        f'<span class="share">{percent(finding.share)} of the time</span><h3>{title}</h3>'
        f"<p>{_words(finding.text)}</p><p>{_words(finding.remedy)}</p></div>"
    )


def _figure(value: str, name: str, more: str) -> str:
    parts = (("value", value), ("name", name), ("more", more))
    inner = "".join(
        f'<div class="{kind}">{html.escape(text)}</div>' for kind, text in parts if text
    )
    return f'<div class="card">{inner}</div>'


def _latency_table(summary: Summary) -> str:
    names = {
        "queue_us": "in the queue",
        "first_token_us": "to the first token",
        "token_us": "for each later token",
        "total_us": "in all",
    }
    spreads = {name: summary.times(key) for key, name in names.items()}
    if not len(spreads["in all"]):
        return ""
    rows = [_row("th", ["of requests", "mean", *(f"{p} %" for p in PERCENTILES), "longest"])]
    for name, values in spreads.items():
        if len(values):
            found = [values.mean(), *np.percentile(values, PERCENTILES), values.max()]
            rows.append(_row("td", [name, *map(duration, map(float, found))]))
    return f'<div class="card table" style="margin-top:14px"><table>{"".join(rows)}</table></div>'


def _row(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _chart(chart: Chart) -> str:
    height = chart.figure.layout.height
    return (
        f'<div class="card"><h3>{html.escape(chart.title)}</h3>'
        f'<p class="soft">{html.escape(chart.text)}</p>'
        f'<div class="plot" id="{chart.name}" style="height:{height}px"></div></div>'
    )
