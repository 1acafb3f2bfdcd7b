"""A quantised weight of given codes, without a checkpoint that fills it."""

from types import ModuleType

import torch

from nanovllm.layers.quantized_weight import QuantizedWeight
from nanovllm.utils.fp8 import Codes
from nanovllm.utils.int4 import Int4Codes


class HeldCodes(QuantizedWeight):
    name = "held"

    def __init__(self, codes: Codes | Int4Codes, dtype: torch.dtype, kernels: ModuleType) -> None:
        data = codes.codes if isinstance(codes, Codes) else codes.data
        shape = data.shape if isinstance(codes, Codes) else codes.shape
        super().__init__(shape[1], dtype, True)
        self.held, self.data, self.kernels = codes, data, kernels  # type: ignore[assignment]

    @property
    def codes(self) -> Codes | Int4Codes:
        return self.held
