"""The bottlenecks of a run in words: each with its figures and its remedy.

The rules look at shares of the time that engines had requests, and name a cause

- from `NOTABLE`, a tenth, up if time is lost (a GPU that waits, sequences that wait for blocks):
  its remedy gains about as much, and smaller shares vary between runs of the same workload;
- from `MOST`, half, up if the time goes into useful work (prompts), or into work that more requests
  could share (few sequences): a run is bound only by the work that takes most of its time.

A decode step reads all weights, however small the batch, so further sequences cost little until
arithmetic takes as long as reading: at 184 rows for 16-bit weights on an H200, with 790e12
operations and 4.3e12 bytes per second. `FEW` is a third of that; `FEW_ON_CPU` is 16, as a CPU does
some 20 operations per byte.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanovllm.report.reading import Engine, Floats
from nanovllm.report.summary import Summary

NOTABLE, MOST = 0.1, 0.5
FEW, FEW_ON_CPU = 64, 16
BLOCKS, PREFILL, HOST, IMAGES, FEW_SEQUENCES, TAIL, NOTHING = (
    *("KV pool too small", "prefill-bound", "host-bound", "images not ready"),
    *("too few sequences", "few sequences at the end", "nothing"),
)


@dataclass(frozen=True)
class Finding:
    """A cause.

    Attributes:
        cause: name of the cause.
        share: share of the time that engines had requests.
        text: evidence in the trace.
        remedy: changes to make; options stand between backticks.
    """

    cause: str
    share: float
    text: str
    remedy: str


def find(summary: Summary) -> list[Finding]:
    """The bottlenecks, largest share first; without any, one finding that says so."""
    rules: list[Callable[[Summary], Finding | None]]
    rules = [blocks, prefill, host, images, few_sequences]
    found = [finding for rule in rules if (finding := rule(summary)) is not None]
    return sorted(found, key=lambda finding: -finding.share) or [nothing(summary)]


def percent(share: float) -> str:
    """A share in whole percent; below ten percent with one decimal."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def blocks(summary: Summary) -> Finding | None:
    """The finding that the KV pool is too small: sequences wait for blocks, or lose them."""
    engines, facts = summary.trace.engines, summary.facts
    share = summary.share(each["seconds"] * (each.held_by == "blocks") for each in engines)
    repeated = summary.num_repeated_tokens
    repeated_share = repeated / max(summary.trace.total("prefill_tokens"), 1)
    again = repeated_share * summary.share(map(prefill_seconds, engines))  # share of the time
    if max(share, again) < NOTABLE:
        return None
    num_blocks, size = engines[0].num_blocks, facts["kvcache_block_size"]
    text = f"Requests waited for KV blocks {percent(share)} of the time. " if share else ""
    text += (
        f"The pool's {num_blocks:,} blocks hold {num_blocks * size:,} tokens in all layers; "
        f"{summary.mean('running'):.0f} sequences ran on average (`max_num_seqs`: "
        f"{facts['max_num_seqs']:,})."
    )
    if preempted := int(summary.trace.total("preempted")):
        text += (
            f" After {preempted:,} preemption{'s' * (preempted != 1)}, {repeated:,} tokens were "
            f"computed again: {percent(repeated_share)} of all prefill."
        )
    remedy = "Give the pool more memory: raise `gpu_memory_utilization`"
    if facts["device"] == "cpu":
        remedy = "Give the pool more memory: raise `kv_cache_memory_bytes`"
    remedy += ", or leave out `num_kvcache_blocks` if you set it"
    if "8" not in facts["kv_cache_dtype"]:
        remedy += '; `kv_cache_dtype="fp8"` holds nearly twice the tokens in the same memory'
    if facts["device"] != "cpu":
        remedy += "; `tensor_parallel_size` spreads weights and blocks over several GPUs"
    remedy += "."
    if preempted:
        remedy += " A lower `max_num_seqs` avoids the preemptions."
    return Finding(BLOCKS, max(share, again), text, remedy)


def prefill(summary: Summary) -> Finding | None:
    """The finding that prompts take most of the time."""
    engines, facts = summary.trace.engines, summary.facts
    share = summary.share(map(prefill_seconds, engines))
    if share < MOST:
        return None
    computed = int(summary.trace.total("prefill_tokens"))
    generated = int(summary.trace.total("sampled_tokens"))
    text = (
        f"Prefill took {percent(share)} of the time: {computed:,} prompt tokens were computed "
        f"for {generated:,} generated tokens. The prefix cache served "
        f"{percent(summary.hit_rate)} of the prompt tokens."
    )
    full = summary.share(each["seconds"] * (each.held_by == "tokens") for each in engines)
    if full >= NOTABLE:
        text += (
            f" The next prompt waited {percent(full)} of the time because the step was full "
            f"(`max_num_batched_tokens`: {facts['max_num_batched_tokens']:,})."
        )
    remedy = "Put the text that prompts share at their beginning, so that it is computed once"
    if not facts["enable_prefix_caching"]:
        remedy = "Leave `enable_prefix_caching` on, so that shared prefixes are computed once"
    remedy += (
        '; `quantization="fp8"` doubles the arithmetic rate of GPUs that support it; '
        "`data_parallel_size` spreads the prompts over several GPUs."
    )
    return Finding(PREFILL, share, text, remedy)


def prefill_seconds(engine: Engine) -> Floats:
    """[steps] prefill time of each step. In a step that also decodes, it is the time beyond the
    median step with decodes only; without any such step, the prompts' share of the tokens.
    """
    seconds, prefill, decode = engine["seconds"], engine["prefill_tokens"], engine["decode_tokens"]
    only_decodes = seconds[(prefill == 0) & (decode > 0)]
    if len(only_decodes):
        base = np.where(decode > 0, np.median(only_decodes), 0.0)
    else:
        base = seconds * decode / np.maximum(prefill + decode, 1)
    return np.where(prefill > 0, np.maximum(seconds - base, 0.0), 0.0)


def host(summary: Summary) -> Finding | None:
    """The finding that the GPU waits for the host. None on a CPU, which is both."""
    busy, facts = summary.gpu_share, summary.facts
    if busy is None:
        return None
    for_images = images_share(summary)
    share = 1 - busy - for_images
    if share < NOTABLE:
        return None
    shares = host_shares(summary)
    largest = max(("schedule", "launch", "book", "between"), key=shares.__getitem__)
    does = {
        "schedule": "scheduling the next step",
        "launch": "launching the step",
        "book": "booking tokens (and detokenizing them for streams)",
        "between": "the caller's own code between two steps",
    }
    step = summary.busy_seconds / sum(len(each["seconds"]) for each in summary.trace.engines) * 1e3
    waits_for = "images or the host" if for_images else "the host"
    text = (
        f"The GPU was busy {percent(busy)} of the time, {busy * step:.2f} of the {step:.2f} ms of "
        f"an average step, and waited for {waits_for} the rest of it. The largest part of the "
        f"host's work was {does[largest]}, {percent(shares[largest])} of the time."
    )
    remedies = []
    if not facts.get("overlap", True):
        remedies.append("leave `overlap` on, so that the host works while the GPU does")
    if not facts["cuda_graphs"]:
        remedies.append("leave `enforce_eager` off: CUDA graphs launch a whole step at once")
    if largest == "between":
        remedies.append("do less in listeners and between calls of step(), or call generate()")
    remedies.append(
        "run larger batches (more prompts per call, a higher `max_num_seqs`): they lengthen steps, "
        "but not the host's part of them"
    )
    remedy = "; ".join(remedies)
    return Finding(HOST, share, text, remedy[0].upper() + remedy[1:] + ".")


def host_shares(summary: Summary) -> dict[str, float]:
    """Shares of the host's time: the four phases of a step, and `between` steps the rest."""
    phases = ("schedule", "launch", "wait", "book")
    shares = {name: summary.share(each[name] for each in summary.trace.engines) for name in phases}
    return {**shares, "between": max(0.0, 1 - sum(shares.values()))}


def images(summary: Summary) -> Finding | None:
    """The finding that requests wait for their images while the device could compute them."""
    share, seconds = images_share(summary), summary.trace.image_seconds
    if share < NOTABLE or not len(seconds):
        return None
    rate = len(seconds) / summary.trace.seconds
    text = (
        f"Requests waited for their images {percent(share)} of the time, while few or no sequences "
        f"ran. {len(seconds):,} images were prepared, {rate:,.1f} a second; each took a thread "
        f"{seconds.mean() * 1e3:,.1f} ms on average, from the file to resized pixels."
    )
    remedy = (
        "Give the process more CPU cores: each prepares one image at a time. Files that are quick "
        "to decode help (JPEG rather than PNG, and no larger than the model sees them), and a "
        "lower `max_pixels` in `mm_processor_kwargs`."
    )
    return Finding(IMAGES, share, text, remedy)


def images_share(summary: Summary) -> float:
    """Share of the time in which requests waited for images and few sequences, or none, ran."""
    return summary.share(map(images_seconds, summary.trace.engines))


def images_seconds(engine: Engine) -> Floats:
    """[steps] that part of the time of each step: the time without one before it, and its own if
    it decodes few sequences.
    """
    few = FEW_ON_CPU if engine.facts["device"] == "cpu" else FEW
    gaps, own = engine["seconds"] - engine["own"], _decodes_few(engine, few, "")
    own = np.where(own > 0, engine["own"], 0.0)
    return np.where(engine.images_waiting > 0, gaps + own, 0.0)


def few_sequences(summary: Summary) -> Finding | None:
    """The finding that decode batches are small: nobody waits, or `max_num_seqs` is low."""
    engines, facts = summary.trace.engines, summary.facts
    few = FEW_ON_CPU if facts["device"] == "cpu" else FEW
    lacking = [_decodes_few(each, few, "") * (each.images_waiting == 0) for each in engines]
    bounded = [_decodes_few(each, few, "sequences") for each in engines]
    share, bounded_share = summary.share(lacking), summary.share(bounded)
    base = f"A decode step reads all weights, whether its batch size is 1 or {few}"
    if bounded_share >= MOST:
        limit, remedy = "the limit set by `max_num_seqs`", "Raise `max_num_seqs`."
        if facts["max_num_seqs"] < facts.get("asked_num_seqs", 0):
            limit = "as memory holds the states of no more"
            remedy = (
                "Leave more memory for states: a higher `gpu_memory_utilization`, smaller weights "
                '(`quantization="fp8"`), or part of them (`tensor_parallel_size`).'
            )
        text = (
            f"Requests waited {percent(bounded_share)} of the time although at most "
            f"{facts['max_num_seqs']:,} sequences ran, {limit}. {base}."
        )
        return Finding(FEW_SEQUENCES, bounded_share, text, remedy)
    pairs = zip(engines, lacking, strict=True)
    rows = sum(float((each["rows"] * part).sum()) for each, part in pairs)
    mean_rows = rows / max(share * summary.busy_seconds, 1e-9)
    if share >= MOST:
        text = (
            f"Fewer than {few} sequences ran {percent(share)} of the time, {mean_rows:.1f} on "
            f"average, and none waited. {base}, so most of the device's capacity was unused."
        )
        remedy = (
            "Give the engine more requests at once: all prompts in one generate(), or many tasks "
            "with AsyncLLM."
        )
        if facts["data_parallel_size"] > 1:
            remedy += " With fewer replicas (`data_parallel_size`), each would have larger batches."
        return Finding(FEW_SEQUENCES, share, text, remedy)
    if share >= NOTABLE and _is_tail(engines, lacking):
        text = (
            f"At the end, for {percent(share)} of the time, fewer than {few} sequences were left, "
            f"{mean_rows:.1f} on average. {base}."
        )
        remedy = (
            "Merge several batches into one, which has only one such end; start with the requests "
            "that generate most."
        )
        return Finding(TAIL, share, text, remedy)
    return None


def _decodes_few(engine: Engine, few: int, held_by: str) -> Floats:
    """[steps] time of each step with fewer than `few` rows and no prompt, while `held_by` is the
    reason why the first in the queue waits; else 0.
    """
    decodes = (engine["prefill_tokens"] == 0) & (engine["rows"] < few)
    return engine["seconds"] * (decodes & (engine.held_by == held_by))


def _is_tail(engines: list[Engine], lacking: list[Floats]) -> bool:
    """Whether three quarters of that time lie in the second half of the run."""
    late = total = 0.0
    for engine, part in zip(engines, lacking, strict=True):
        ends = np.cumsum(engine["seconds"])
        late += float(part[ends > ends[-1] / 2].sum())
        total += float(part.sum())
    return late >= 0.75 * total


def nothing(summary: Summary) -> Finding:
    """The finding that no rule applies."""
    text = "No bottleneck took a notable share of the time."
    if (busy := summary.gpu_share) is not None:
        text += f" The GPU was busy {percent(busy)} of it."
    text += f" {summary.mean('running'):.0f} sequences ran on average."
    if (share := summary.roofline_share) is not None:
        text += f" The steps reached {percent(share)} of the roofline."
    remedy = (
        "The rest is the work itself: use fewer bits (`quantization`, `kv_cache_dtype`) or more "
        "GPUs (`data_parallel_size`, `tensor_parallel_size`)."
    )
    return Finding(NOTHING, 0.0, text, remedy)
