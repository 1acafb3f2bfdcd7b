"""The least time that a workload can take, by the operations and bytes it cannot do without.

Prefill is bound by arithmetic (matrix products, and causal attention of every prompt), decode by
reading: in every step the weights once, and the keys and values of all tokens of the sequences
that still run, those of a common prefix once for all. A decode step takes at least the longer of
its reading and its arithmetic. All sequences start at once and none waits.

The functions take a workload as the lengths of its prompts and outputs, so they know nothing of
engines. `HARDWARE` holds what was measured: a device-to-device copy, and a 16-bit matrix product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.model_config import ModelConfig


class Hardware(NamedTuple):
    """What a device can do at most."""

    bandwidth: float  # bytes per second
    flops: float  # operations per second

    def times(self, count: int) -> "Hardware":
        """Several such devices together."""
        return Hardware(self.bandwidth * count, self.flops * count)


HARDWARE = {"NVIDIA H200": Hardware(4.3e12, 790e12)}  # by torch.cuda.get_device_name()


def hardware(
    name: str, itemsize: int, bandwidth: float | None = None, flops: float | None = None
) -> Hardware | None:
    """The limits of device `name`, those given first; None where one is not known."""
    known = HARDWARE.get(name) if itemsize == 2 else None  # flops are those of 16 bits
    if known is not None:
        return Hardware(bandwidth or known.bandwidth, flops or known.flops)
    return Hardware(bandwidth, flops) if bandwidth and flops else None


class Work(NamedTuple):
    """What a workload cannot do without.

    Attributes:
        prefill_flops: operations of all prompts.
        step_flops: [steps] operations of each decode step.
        step_bytes: [steps] bytes that each decode step reads.
    """

    prefill_flops: float
    step_flops: NDArray[np.float64]
    step_bytes: NDArray[np.float64]

    def seconds(self, hardware: Hardware) -> tuple[float, float]:
        """The least seconds of prefill and of decode."""
        steps = np.maximum(self.step_flops / hardware.flops, self.step_bytes / hardware.bandwidth)
        return self.prefill_flops / hardware.flops, float(steps.sum())


def matrix_parameters(config: ModelConfig) -> tuple[int, int]:
    """Weights that every token is multiplied by: of all layers, and of the LM head."""
    M, D = config.hidden_size, config.head_dim
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = M * (heads * D + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer, config.vocab_size * M


def work(
    config: ModelConfig,
    itemsize: int,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    num_shared: int = 0,
) -> Work:
    """The work of prompts that generate outputs; the first token of each comes from prefill.

    Args:
        itemsize: bytes of a weight, and of an element of the KV cache.
        num_shared: tokens at the beginning of every prompt that are in the cache already.
    """
    layers, head = matrix_parameters(config)
    prompts, outputs = np.array(prompt_lens), np.array(output_lens)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    pairs = ((prompts**2 - num_shared**2) / 2).sum()  # of a query and a key that it sees
    prefill = 2 * (layers * (prompts - num_shared).sum() + head * len(prompts)) + 4 * width * pairs
    # Step t sees prompt + t tokens of each sequence whose output is longer than t.
    steps = np.arange(1, outputs.max())
    order = np.argsort(outputs)
    done = np.searchsorted(outputs[order], steps, side="right")  # [steps]
    running = len(outputs) - done
    lens_done = np.concatenate([[0], np.cumsum(prompts[order])])[done]
    contexts = (prompts.sum() - lens_done + running * steps).astype(np.float64)
    read = contexts - (running - 1) * num_shared
    return Work(
        prefill_flops=float(prefill),
        step_flops=2.0 * (layers + head) * running + 4.0 * width * contexts,
        step_bytes=itemsize * (float(layers + head) + kv_width * read),
    )


def report(work: Work, seconds: float, hardware: Hardware | None) -> dict[str, Any]:
    """What a run of `seconds` achieved: as a dictionary for JSON.

    `bytes_per_s` is what decode has to read over all of the time, `flops_per_s` stands in its
    place for workloads without decode, `roofline_share` is None where the limit is not known.
    """
    size = float(work.step_bytes.sum())
    name, amount = ("bytes_per_s", size) if size else ("flops_per_s", work.prefill_flops)
    limit = None if hardware is None else sum(work.seconds(hardware))
    return {
        name: float(f"{amount / seconds:.4g}"),
        "roofline_s": None if limit is None else float(f"{limit:.4g}"),
        "roofline_share": None if limit is None else round(limit / seconds, 4),
    }


def describe(report: dict[str, Any]) -> str:
    """The same in words."""
    name = "bytes_per_s" if "bytes_per_s" in report else "flops_per_s"
    text = f"{report[name] / 1e9:.4g} {'GB/s' if name == 'bytes_per_s' else 'GFLOP/s'}"
    share = report["roofline_share"]
    return text if share is None else f"{text}, {share:.1%} of the roofline"
