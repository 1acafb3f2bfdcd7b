"""`Summary`: the figures of a trace, for the report and for the rules of `findings.py`."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.benchmark import limits
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.report.reading import Engine, Floats, Trace

PERCENTILES = (50, 90, 99)


@dataclass
class Summary:
    """The figures of a trace. Shares are of the time that engines had requests, summed over
    replicas.

    Args:
        trace: trace to sum up.
        bandwidth: limit of one device in bytes per second; None: from the table of known devices.
        flops: limit of one device in operations per second; None: from the same table.
    """

    trace: Trace
    bandwidth: float | None = None
    flops: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the first engine; replicas differ in their devices only."""
        return self.trace.engines[0].facts

    @cached_property
    def busy_seconds(self) -> float:
        """Time in which engines had requests."""
        return self.trace.total("seconds")

    def share(self, seconds: Iterable[Floats]) -> float:
        """Share of that time, from the seconds of each engine's steps."""
        return sum(float(each.sum()) for each in seconds) / self.busy_seconds

    def mean(self, column: str) -> float:
        """Mean of a column over that time."""
        return self.share(each[column] * each["seconds"] for each in self.trace.engines)

    # -- requests -------------------------------------------------------------------------------

    def num_requests(self, *reasons: str) -> int:
        """Number of requests whose completions all ended for one of the reasons."""
        ended: dict[int, bool] = {}
        for seq in self.trace.sequences:
            request = seq["request"]
            ended[request] = ended.get(request, True) and seq["finish_reason"] in reasons
        return sum(ended.values())

    def times(self, name: str) -> Floats:
        """[finished sequences] seconds from the arrival for `queue_us`, `first_token_us` and
        `total_us`; for `token_us` the time per output token after the first.
        """
        found = []
        for seq in self.trace.sequences:
            if seq["finish_reason"] not in ("stop", "length"):
                continue
            if name != "token_us":
                found.append(seq[name])
            elif seq["generated_tokens"] > 1:
                found.append(
                    (seq["total_us"] - seq["first_token_us"]) / (seq["generated_tokens"] - 1)
                )
        return np.array(found, np.float64) / 1e6

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache served."""
        prompt = sum(seq["prompt_tokens"] for seq in self.trace.sequences)
        return sum(seq["cached_tokens"] for seq in self.trace.sequences) / max(prompt, 1)

    @property
    def num_repeated_tokens(self) -> int:
        """Tokens recomputed after preemptions: prefill tokens beyond those of the prompts."""
        once = sum(
            seq["prompt_tokens"] - seq["cached_tokens"]
            for seq in self.trace.sequences
            if seq["queue_us"] is not None
        )
        has_repeats = self.trace.total("preempted") > 0
        return max(0, int(self.trace.total("prefill_tokens")) - once) if has_repeats else 0

    # -- the device -----------------------------------------------------------------------------

    @property
    def gpu_share(self) -> float | None:
        """Share of that time in which the GPU computed; None if the device is the host."""
        share = self.share(each["gpu"] for each in self.trace.engines)
        return None if np.isnan(share) else share

    @property
    def peak_pool_share(self) -> float:
        """Largest share of its KV blocks that an engine used."""
        return max(
            float(each["used_blocks"].max()) / each.num_blocks for each in self.trace.engines
        )

    @cached_property
    def least_seconds(self) -> list[Floats] | None:
        """Least time of each step by the limits of its device, [steps] for each engine; None if
        the limits are unknown.
        """
        found = [least_seconds(each, self.bandwidth, self.flops) for each in self.trace.engines]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    @property
    def roofline_share(self) -> float | None:
        """Least time of all steps, divided by the time that they took."""
        return None if self.least_seconds is None else self.share(self.least_seconds)


def least_seconds(engine: Engine, bandwidth: float | None, flops: float | None) -> Floats | None:
    """[steps] least time of each step, see `limits.least_step_seconds`. Shared prefixes are read
    once at best, so no more keys are counted than the pool held.
    """
    facts = engine.facts
    itemsize = 4 if facts["dtype"] == "float32" else 2
    device = limits.hardware(facts["device_name"], itemsize, bandwidth, flops)
    if device is None:
        return None
    config = model_config(facts["config"])
    held = engine["used_blocks"] * facts["kvcache_block_size"]
    windows = (0, *facts["windows"])
    num_tokens = engine["prefill_tokens"] + engine["decode_tokens"]
    steps = limits.Steps(
        num_tokens.astype(np.int64),
        engine["sampled_tokens"].astype(np.int64),
        np.minimum(engine["running"], num_tokens).astype(np.int64),
        {w: np.minimum(engine.keys[:, i], held).astype(np.int64) for i, w in enumerate(windows)},
        {w: engine.pairs[:, i].astype(np.int64) for i, w in enumerate(windows)},
    )
    sizes = limits.itemsizes(config, itemsize, facts["kv_cache_dtype"], facts["quantization"])
    several = device.times(facts["tensor_parallel_size"])
    return limits.least_step_seconds(config, sizes, steps, several)


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The model of a config.json."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return ModelConfig.from_pretrained(directory)
