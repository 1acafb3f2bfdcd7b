"""The report as one HTML page, with plotly.js and all data in it: it loads nothing."""

import html
import json
import re
from collections.abc import Iterable

import numpy as np
from plotly.offline import get_plotlyjs

from nanovllm.report.charts import TIMES, Chart, charts
from nanovllm.report.findings import NOTHING, Finding, find, percent
from nanovllm.report.summary import PERCENTILES, Summary
from nanovllm.report.words import duration, key_figures, subtitle, unknown, warnings

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
  border: 1px solid var(--line); border-radius: 4px; padding: 0 4px; white-space: nowrap; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 0 0 14px; }
.finding { border-left: 4px solid var(--warn); }
.finding.fine { border-left-color: var(--good); }
.finding .share { float: right; font-weight: 600; color: var(--warn); }
.finding.fine .share { display: none; }
.finding h3::first-letter { text-transform: uppercase; }
.figures { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(
  max(150px, calc((100% + 9px) / var(--columns) - 10px)), 1fr)); }
.figures .card { margin: 0; padding: 12px 14px; }
.figures .value { font-size: 1.1rem; font-weight: 600; white-space: nowrap; }
.figures .name, .figures .more { color: var(--soft); font-size: 0.88rem; line-height: 1.4; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 0 4px 24px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; }
.plot { width: 100%; }
@media (max-width: 560px) { main { padding: 20px 10px 48px; } .card { padding: 12px 10px; }
  .figures { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  table { font-size: 0.86rem; } th, td { padding-left: 10px; }
  td:first-child { white-space: normal; } }
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
    """The page as HTML.

    Args:
        summary: figures of the trace.
        source: name of the trace.
    """
    drawn, key = charts(summary), key_figures(summary)
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
            "<h2>Bottlenecks</h2>",
            *map(_finding, find(summary)),
            *(f'<p class="soft">{_words(each)}</p>' for each in unknown(summary)),
            "<h2>Key figures</h2>",
            f'<div class="figures" style="--columns:{(len(key) + 1) // 2}">',  # two rows
            *(_figure(*each) for each in key),
            "</div>",
            _latency_table(summary),
            "<h2>Over time</h2>",
            '<p class="soft">Drag across a chart to zoom in, double-click to zoom out; a click on '
            "a legend entry hides its curve.</p>",
            *map(_chart, drawn),
            f'<p class="soft">Drawn by <code>nanovllm report</code> from {html.escape(source)}, '
            "which https://ui.perfetto.dev shows step by step.</p>",
            f"</main><script>const FIGURES = {{{figures}}};{SCRIPT}</script></body></html>",
        ]
    )


# -- parts -----------------------------------------------------------------------------------------


def _words(text: str) -> str:
    """Text for HTML. Names of options stand between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _finding(finding: Finding) -> str:
    fine = finding.cause == NOTHING
    title = "None found" if fine else finding.cause
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
    spreads = {name: summary.times(key) for key, (name, _) in TIMES.items()}
    if not len(summary.times("total_us")):
        return ""
    percentiles = (f"p{each}" for each in PERCENTILES)
    rows = [_row("th", ["Latency", "mean", *percentiles, "max"])]
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
