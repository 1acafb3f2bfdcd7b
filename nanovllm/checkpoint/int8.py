"""`Int8`: the format of matrices in 8 bits as integers, and how config.json spells it.

INT8 codes have one scale per row, or per tensor, and products have activations in INT8, too (W8A8),
quantised by the values of each token, also where the checkpoint has one scale for all tokens. One
spelling is read: a group of "compressed-tensors" with `type` "int" and 8 bits.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checkpoint.files import read_value
from nanovllm.checkpoint.refusals import unsupported_quantization


@dataclass(frozen=True)
class Int8:
    """The format of INT8 matrices.

    Attributes:
        per_row: whether each row has a scale of its own, not the whole tensor one.
        scale: name of the scales in the checkpoint, after that of the module.
    """

    per_row: bool
    scale: str = "weight_scale"


def read_int8_group(group: dict[str, Any], form: Any) -> Int8:
    """The format of a group of compressed-tensors, whose `weights` are 8-bit integers.

    Args:
        group: the group in config.json.
        form: `format` of the group.
    """
    weights, inputs = group["weights"], group.get("input_activations")
    strategy, symmetric = weights.get("strategy"), read_value(weights, "symmetric", bool, True)
    if strategy not in ("channel", "tensor") or form != "int-quantized" or not symmetric:
        kind = "symmetric" if symmetric else "asymmetric"
        raise unsupported_quantization(
            f"compressed-tensors, {kind} 8-bit int, strategy {strategy}, format {form}"
        )
    if wrong := _wrong_activations(inputs):
        raise unsupported_quantization(f"compressed-tensors, 8-bit int, activations {wrong}")
    return Int8(strategy == "channel")


def _wrong_activations(inputs: Any) -> str:
    """The unsupported part of `input_activations`; "": none."""
    if not isinstance(inputs, dict):
        return "in 16 bits"
    kind, bits, strategy = (inputs.get(key) for key in ("type", "num_bits", "strategy"))
    if (kind, bits) != ("int", 8):
        return f"in {bits}-bit {kind}"
    if not read_value(inputs, "symmetric", bool, True):
        return "asymmetric"
    return "" if strategy in ("token", "tensor") else f"with strategy {strategy}"
