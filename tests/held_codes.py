"""A quantised weight of given codes, without a checkpoint that fills it, and what it launches."""

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from nanovllm.compiling.rehearsal import ROWS
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes


class HeldCodes(QuantizedWeight):
    name = "held"

    def __init__(self, codes: Codes | Int4Codes, dtype: torch.dtype, kernels: ModuleType) -> None:
        data = codes.codes if isinstance(codes, Codes) else codes.data
        super().__init__(dtype, fused=True)
        self.held, self.data, self.kernels = codes, data, kernels  # type: ignore[assignment]

    @property
    def codes(self) -> Codes | Int4Codes:
        return self.held


def record_launches(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[ModuleType, str]
) -> list[tuple[object, ...]]:
    """Record the keys by which the compiler tells launches apart, instead of launching."""
    launched: list[tuple[object, ...]] = []

    def launch(kernel: str, *grid: object) -> Callable[..., None]:
        return lambda *args, **how: launched.append((kernel, types(args), constants(how)))

    def types(args: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(getattr(x, "dtype", str(getattr(x, "block_shape", x is None))) for x in args)

    def constants(how: dict[str, object]) -> tuple[object, ...]:
        return tuple(sorted((name, str(value)) for name, value in how.items()))

    for module, name in kernels.items():
        kernel = type(name, (), {"__class_getitem__": functools.partial(launch, name)})
        monkeypatch.setattr(module, name, kernel)
    return launched


def count_rehearsed(
    launched: list[tuple[object, ...]], multiply: Callable[[int], object], most: int = 300
) -> int:
    """The kernels that products of a rehearsal's numbers of rows take; others take no more."""
    launched.clear()
    for T in ROWS:
        multiply(T)
    rehearsed = set(launched)
    for T in range(1, most):
        multiply(T)
    assert set(launched) == rehearsed
    return len(rehearsed)
