"""`TensorSource`: a tensor in memory, in the place of one in a file. Checks of its layout, and of
equal values.
"""

from typing import Any

import torch
from torch import _C  # PyTorch has no public name for `_has_storage`

# The dtypes of safetensors by those of PyTorch.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of each


class TensorSource:
    """A tensor with the interface of a slice of safetensors.

    Args:
        tensor: tensor of the checkpoint, whole, on any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype, as safetensors names it."""
        return DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that no file could hold as it is: without values of its own, sparse or
    quantised.

    Raises:
        ValueError: naming it, with the remedy.
    """
    if tensor.is_meta:
        raise ValueError(f"tensor {name} has no values: it is on the device meta")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # its memory is elsewhere
        raise ValueError(
            f"tensor {name} is of the type {kind.__name__}: pass a plain tensor of all its values, "
            "such as tensor.full_tensor() of a DTensor"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor {name} has the layout {tensor.layout}: pass tensor.to_dense()")
    if tensor.is_quantized:
        raise ValueError(f"tensor {name} is {tensor.dtype}: pass tensor.dequantize()")
    # Under a transform of torch.func a tensor has no storage, but another tensor in it.
    if _C._has_storage(tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(
            f"tensor {name} has no values: its memory is freed, as FSDP does between its steps; "
            "gather it first"
        )


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one dtype and device have the same values, or the same bits: NaN."""
    if torch.equal(one, other):
        return True
    integer = INTEGERS[one.dtype.itemsize]
    return torch.equal(one.view(integer), other.view(integer))
