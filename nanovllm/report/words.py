"""The report in words: the run, its key figures, the causes. The page has these, too."""

import time

from nanovllm.report.findings import NOTHING, find, percent
from nanovllm.report.summary import Summary


def in_words(summary: Summary) -> str:
    """The report without its charts."""
    lines = [subtitle(summary), *warnings(summary)]
    for value, name, more in key_figures(summary):
        lines.append(f"{value} {name}" + f" ({more})" * bool(more))
    lines += ["", "Bottlenecks:"]
    for each in find(summary):
        title = f"{each.cause[0].upper()}{each.cause[1:]} ({percent(each.share)} of the time)"
        lines += ["", "None found" if each.cause == NOTHING else title, each.text, each.remedy]
    if left_open := unknown(summary):
        lines += ["", *left_open]
    return "\n".join(lines)


def subtitle(summary: Summary) -> str:
    """The model, the device and the time of the run."""
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
    """Gaps in the recording: a full file, a missing end."""
    trace, found = summary.trace, []
    if trace.is_full:
        found.append(
            f"The trace file was full after {duration(trace.seconds)}: this report lacks the rest "
            "of the run. `with llm.trace(path):` records a part of a long run."
        )
    if not trace.has_ended:
        found.append("The recording has no end: its process was killed or is still running.")
    return found


def unknown(summary: Summary) -> list[str]:
    """Gaps in the report, with the reason: a CPU, a device without known limits."""
    found, name = [], summary.facts["device_name"]
    if summary.gpu_share is None:
        found.append(
            "On a CPU, host and device are the same: the report cannot tell whether the run is "
            "host-bound."
        )
    if summary.least_seconds is None:
        found.append(
            f"The share of the roofline is missing because the limits of this device ({name}, "
            f"{summary.facts['dtype']}) are unknown: pass them as `--bandwidth` and `--flops`."
        )
    return found


def key_figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Value, name and detail of each figure: "4 ms", "run time", "100% with requests"."""
    trace, facts = summary.trace, summary.facts
    seconds, generated = trace.seconds, trace.total("sampled_tokens")
    busy = min(1.0, summary.busy_seconds / seconds / len(trace.engines))
    prompts, steps = trace.total("prefill_tokens"), sum(len(e["seconds"]) for e in trace.engines)
    done, left = summary.num_requests("stop", "length"), summary.num_requests("unfinished")
    more = [f"{left:,} unfinished"] * (left > 0)
    for reason, what in (("aborted", "aborted"), ("error", "ended with an error")):
        more += [f"{count:,} {what}" for count in [summary.num_requests(reason)] if count]
    running, num_blocks = f"{summary.mean('running'):,.1f}", trace.engines[0].num_blocks
    pool = f"{num_blocks:,} blocks of {facts['kvcache_block_size']} tokens"
    preempted = int(trace.total("preempted"))
    again = f"{summary.num_repeated_tokens:,} tokens recomputed" if preempted else ""
    found = [
        (f"{generated / seconds:,.0f} tok/s", "generation throughput", f"{generated:,.0f} tokens"),
        (f"{prompts / seconds:,.0f} tok/s", "prefill throughput", f"{prompts:,.0f} tokens"),
        (f"{done:,}", f"request{'s' * (done != 1)} finished", ", ".join(more)),
        (duration(seconds), "first step to last", f"{percent(busy)} with requests"),
        (f"{steps:,}", f"step{'s' * (steps != 1)}", f"{duration(trace.total('own') / steps)} each"),
        (running, "running sequences on average", f"limit {facts['max_num_seqs']:,}"),
        (percent(summary.peak_pool_share), "peak KV pool usage", pool),
        (percent(summary.hit_rate), "prefix cache hit rate", ""),
        (f"{preempted:,}", f"preemption{'s' * (preempted != 1)}", again),
    ]
    if summary.gpu_share is not None:
        found.append((percent(summary.gpu_share), "GPU busy time", ""))
    if summary.roofline_share is not None:
        found.append((percent(summary.roofline_share), "share of the roofline", ""))
    return found


def duration(seconds: float) -> str:
    """A duration with three digits, in the unit that suits it."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
