"""The least time that a workload can take, from the operations and bytes that it needs.

Prefill is bound by arithmetic (matrix products, and causal attention of every prompt), decode by
reading: every step reads the weights once, and the keys and values of all tokens of the sequences
that still run, those of a common prefix once for all, and none outside a layer's window; states of
sequences are read and written. A step reads the experts that are active for its tokens. A decode
step takes at least the longer of its reading and its arithmetic. All sequences start at once and
none waits.

The functions describe a workload by the lengths of its prompts and outputs, so they know nothing of
engines. `HARDWARE` holds measured limits: of a device-to-device copy and a 16-bit matrix product.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.checkpoint.int4 import Int4
from nanovllm.checkpoint.model_config import MXFP4_BLOCK, ModelConfig
from nanovllm.sizing.model_size import ModelSize, model_size, states


class Hardware(NamedTuple):
    """The limits of a device."""

    bandwidth: float  # bytes per second
    flops: float  # operations per second

    def times(self, count: int) -> "Hardware":
        """The limits of `count` such devices together."""
        return Hardware(self.bandwidth * count, self.flops * count)


HARDWARE = {"NVIDIA H200": Hardware(4.3e12, 790e12)}  # keyed by torch.cuda.get_device_name()


def hardware(
    name: str, itemsize: int, bandwidth: float | None = None, flops: float | None = None
) -> Hardware | None:
    """The limits of device `name`; those given take precedence. None if one is not known."""
    known = HARDWARE.get(name) if itemsize == 2 else None  # its flops are for 16 bits
    if known is not None:
        return Hardware(bandwidth or known.bandwidth, flops or known.flops)
    return Hardware(bandwidth, flops) if bandwidth and flops else None


class Work(NamedTuple):
    """The operations and bytes that a workload needs.

    Attributes:
        prefill_flops: operations of all prompts; in 8 bits two count as one.
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


class Itemsizes(NamedTuple):
    """Bytes of a value.

    Attributes:
        kv: bytes of a value in the KV cache, with its share of an exponent.
        linear: bytes of a value in a linear layer's matrix, with its share of a scale.
        plain: bytes of a value in a matrix that is not quantised (`ModelSize`).
        head: bytes of a value in the LM head.
        activation: bytes of a value between layers.
    """

    kv: float
    linear: float
    plain: float
    head: float
    activation: int = 2


def itemsizes(config: ModelConfig, itemsize: int, kv_cache_dtype: str, held: str) -> Itemsizes:
    """Bytes of values in a model with activations of `itemsize` bytes, whose matrices are `held` in
    "none", "fp8", "int8", "int4" or "mxfp4". If it was quantised while it was loaded, its LM head
    is in INT8.
    """
    kv, found = 1 + 1 / config.head_dim if "8" in kv_cache_dtype else itemsize, config.quantization
    if found is not None and isinstance(found.format, Int4) and held == "int4":
        return Itemsizes(kv, 0.5 + 4 / found.format.group, itemsize, itemsize, itemsize)
    if held == "mxfp4":
        return Itemsizes(kv, 0.5 + 1 / MXFP4_BLOCK, itemsize, itemsize, itemsize)
    linear = 1 if held in ("fp8", "int8") else itemsize
    head = linear if found is None else itemsize
    return Itemsizes(kv, linear, itemsize, head, itemsize)


def work(
    config: ModelConfig,
    sizes: Itemsizes,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    num_shared: int = 0,
) -> Work:
    """The work of prompts that generate outputs; the first token of each comes from prefill.

    Args:
        config: model.
        sizes: bytes of its values.
        prompt_lens, output_lens: lengths of prompts and outputs, in tokens.
        num_shared: number of tokens at the beginning of every prompt that are cached already.
    """
    matrices = model_size(config)
    prompts, outputs = np.array(prompt_lens), np.array(output_lens)
    width = config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_key_value_heads * config.head_dim
    # Step t sees prompt + t tokens of each sequence whose output is longer than t.
    steps = np.arange(1, outputs.max())[:, None]
    running = outputs > steps  # [steps, sequences]
    contexts = (prompts + steps) * running
    num_running = running.sum(1)
    kept = states(config, sizes.activation)
    flops_of_token = _operations(matrices, sizes) + kept.flops
    prefill = flops_of_token * (prompts - num_shared).sum()
    prefill += 2 * matrices.head * len(prompts)
    step_flops = (flops_of_token + 2.0 * matrices.head) * num_running
    step_bytes = _bytes(matrices, sizes, num_running) + sizes.head * matrices.head
    step_bytes += 2 * kept.num_bytes * num_running
    for window, count in _windows(config).items():
        pairs = (_pairs(prompts, window) - _pairs(np.array(num_shared), window)).sum()
        seen = np.minimum(contexts, window) if window else contexts
        shared = np.maximum(num_shared - (contexts - seen), 0) * running  # tokens of `seen`
        read = seen.sum(1) - shared.sum(1) + shared.max(1, initial=0)
        prefill += count * 4 * width * pairs
        step_flops += count * 4.0 * width * seen.sum(1)
        step_bytes += count * sizes.kv * kv_width * read
    return Work(float(prefill), step_flops, step_bytes)


class Steps(NamedTuple):
    """The computed work of steps, as a timeline records it.

    Attributes:
        num_tokens: [steps] tokens.
        num_sampled: [steps] rows of the LM head.
        num_seqs: [steps] sequences.
        keys: [steps] keys that rows see, each counted once per sequence, by the layers' window in
            tokens (0: all).
        pairs: [steps] pairs of a query and a key that it sees, by window, too.
    """

    num_tokens: NDArray[np.int64]
    num_sampled: NDArray[np.int64]
    num_seqs: NDArray[np.int64]
    keys: Mapping[int, NDArray[np.int64]]
    pairs: Mapping[int, NDArray[np.int64]]


def least_step_seconds(
    config: ModelConfig, sizes: Itemsizes, steps: Steps, hardware: Hardware
) -> NDArray[np.float64]:
    """[steps] the least seconds of each step, the longer of its reading and its arithmetic: for the
    batches as they were, where `work` assumes all sequences at once.
    """
    matrices, tokens = model_size(config), steps.num_tokens
    width = config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_key_value_heads * config.head_dim
    samples = steps.num_sampled > 0
    kept = states(config, sizes.activation)
    flops = (_operations(matrices, sizes) + kept.flops) * tokens
    flops = flops + 2.0 * matrices.head * steps.num_sampled
    size = _bytes(matrices, sizes, tokens) + sizes.head * matrices.head * samples
    size = size + 2 * kept.num_bytes * steps.num_seqs
    for window, count in _windows(config).items():
        flops += count * 4.0 * width * steps.pairs[window]
        size += count * sizes.kv * kv_width * steps.keys[window]
    return np.maximum(flops / hardware.flops, size / hardware.bandwidth)


def _windows(config: ModelConfig) -> Counter[int]:
    """The number of layers that attend, by their windows."""
    return Counter(layer.window for layer in config.layers if layer.rope is not None)


def _operations(matrices: ModelSize, sizes: Itemsizes) -> float:
    """Operations per token in all linear layers, for each value a multiplication and an addition;
    products in FP8 run at twice the rate, and count as half.
    """
    linear = 1 if sizes.linear == 1 else 2
    return linear * matrices.linear.of_token + 2 * matrices.plain.of_token


def _bytes(
    matrices: ModelSize, sizes: Itemsizes, num_tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[steps] bytes of the linear layers' matrices that steps with so many tokens read."""
    linear, plain = matrices.linear.read(num_tokens), matrices.plain.read(num_tokens)
    return sizes.linear * linear + sizes.plain * plain


def _pairs(lens: NDArray[np.int64], window: int) -> NDArray[np.float64]:
    """Pairs of a query and a key that it sees, in prompts of these lengths."""
    begins = np.minimum(lens, window) if window else lens
    return begins**2 / 2 + (lens - begins) * window


def report(work: Work, seconds: float, hardware: Hardware | None) -> dict[str, Any]:
    """The results of a run of `seconds`, as a dictionary for JSON.

    `bytes_per_s` are the bytes that decode has to read, over the whole time; `flops_per_s` takes
    its place for workloads without decode; `roofline_share` is None if the limit is not known.
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
    """The results in words."""
    name = "bytes_per_s" if "bytes_per_s" in report else "flops_per_s"
    text = f"{report[name] / 1e9:.4g} {'GB/s' if name == 'bytes_per_s' else 'GFLOP/s'}"
    share = report["roofline_share"]
    return text if share is None else f"{text}, {share:.1%} of the roofline"
