"""The product for Hopper that activates what it multiplies, which runs nowhere else: against
float64; and when it is taken.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from attention_cases import DEVICE, needs_hopper

from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.compiling.rehearsal import ROWS
from nanovllm.kernels import activation
from nanovllm.kernels import device_features as hopper
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.products import gated
from nanovllm.kernels.products import hopper_gated as gated_hopper
from nanovllm.kernels.products.gated import MANY, takes_hopper_kernel
from nanovllm.layers.weights.fp8 import Fp8Weight
from nanovllm.layers.weights.weight import Gate, PlainWeight
from nanovllm.tensors.fp8 import FP8, Codes

SEED = 9


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def numbers_of(x: torch.Tensor | Codes) -> torch.Tensor:
    return (x.numbers() if isinstance(x, Codes) else x).double()


def check_gated(
    out: torch.Tensor, x: torch.Tensor | Codes, weight: torch.Tensor | Codes, gelu: bool
) -> None:
    """Sums err as in `test_fp8.check_product`, or by float32; |act| grows by at most 1.13 times as
    much, and both activations are at most their argument.
    """
    numbers, matrix = numbers_of(x), numbers_of(weight)
    gates, ups = (numbers @ matrix.T).chunk(2, 1)
    wanted = (F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)) * ups
    max_gates, max_ups = (numbers.abs() @ matrix.abs().T).chunk(2, 1)
    step = 2.0**-9 if isinstance(x, Codes) else 2.0**-16
    bound = step * (1.13 * max_gates * ups.abs() + max_ups * gates.abs())
    bound += step**2 * max_gates * max_ups + 2.0**-8 * wanted.abs() + 1e-6
    error = (out.double() - wanted).abs()
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(
    ("T", "I", "K"),
    [
        (1, 128, 128),  # the last tile has one row, and a program one step
        (1000, 384, 1024),
        (512, 3072, 1024),
        (5000, 256, 192 * 8),  # fewer tiles of rows than stay in the cache
        (4096, 2560, 9728),  # more
    ],
)
def test_hopper_gated(
    T: int, I: int, K: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program per multiprocessor, few programs with many tiles, and one program per tile."""
    dtype = torch.bfloat16 if kind == FP8 else kind
    behind = randn(T + 200, K, seed=1, dtype=dtype)
    behind[T:] = torch.nan
    x = behind[:T]
    weight: torch.Tensor | Codes = randn(2 * I, K, seed=2, dtype=dtype) * 2 / K**0.5
    if kind == FP8:
        assert isinstance(weight, torch.Tensor)
        weight = quantize(weight * torch.logspace(-1, 1, 2 * I, device=DEVICE)[:, None], 0)
    given = quantize(x, 0) if kind == FP8 else x
    room = torch.full((T + 200, I), torch.nan, dtype=dtype, device=DEVICE)
    for number, gelu in ((None, False), (3, True), (10**6, False)):
        with monkeypatch.context() as changed:
            if number is not None:
                changed.setattr(gated_hopper, "num_multiprocessors", lambda index, n=number: n)
            out = gated_hopper.hopper_gated(x, weight, dtype, gelu, room[:T])
        check_gated(out, given, weight, gelu)
        assert room[T:].isnan().all() and out.data_ptr() == room.data_ptr()
    if kind == FP8:  # as a norm hands them on, and another rank
        given = quantize(randn(T + 32, K, seed=3, dtype=dtype), 0)[16 : 16 + T]
        check_gated(gated_hopper.hopper_gated(given, weight, dtype, True), given, weight, True)


@pytest.mark.gpu
@needs_hopper
def test_a_weight_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many rows; and without it, the result agrees."""
    weight = PlainWeight(randn(512, 256, seed=3, dtype=torch.bfloat16) / 16, fused=True)
    x = randn(MANY // 2, 256, seed=4, dtype=torch.bfloat16)
    calls, hopper_gated = [], gated_hopper.hopper_gated

    def spy(x: torch.Tensor, *args: Any) -> Any:
        calls.append(len(x))
        return hopper_gated(x, *args)

    monkeypatch.setattr(gated_hopper, "hopper_gated", spy)
    for rows, switched_on in ((len(x), True), (len(x), False), (len(x) - 1, True)):
        monkeypatch.setattr(hopper, "own_kernels", switched_on)
        check = weight.multiply(x[:rows], gate=Gate())
        torch.testing.assert_close(check, activation.act_and_mul(F.linear(x[:rows], weight.data)))
    assert calls == [len(x)]


@pytest.mark.gpu
@needs_hopper
def test_a_weight_of_codes_quantises_what_it_gates() -> None:
    """Codes with a scale per row, as products need them: 4 bits of each number are kept."""
    codes = quantize(randn(512, 256, seed=5, dtype=torch.bfloat16) / 16, 0)
    with torch.device(DEVICE):
        weight = Fp8Weight(512, 256, torch.bfloat16, True, Fp8((1, 0), ""))
    weight.data.data, weight.scales.data = codes.codes, codes.scales
    x = quantize(randn(MANY, 256, seed=6, dtype=torch.bfloat16), 0)
    numbers, gated = (
        weight.multiply(x, gate=Gate(next_block=act_block)) for act_block in (None, 0)
    )
    assert isinstance(numbers, torch.Tensor) and isinstance(gated, Codes)
    check_gated(numbers, x, codes, False)
    least = 2.0**-10 * numbers.abs().amax(1, keepdim=True) / 448  # half a step of subnormal codes
    error = (gated.numbers() - numbers).abs()
    assert (error <= 2.0**-4 * numbers.abs() + 1.01 * least).all()


def test_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many rows of 16 bits or FP8 with scales of rows, whole tiles, and no bias."""

    def taken(
        T: int = MANY // 2, N: int = 512, K: int = 128, dtype: Any = torch.bfloat16,
        bias: torch.Tensor | None = None, rows: int = 1, results: torch.dtype | None = None,
    ) -> bool:  # fmt: skip
        weight: Any = torch.empty(N, K, dtype=dtype)
        if dtype.itemsize == 1:
            weight = Codes(weight, torch.empty(N // rows, 1), (rows, K))
            results = results or torch.bfloat16
        return takes_hopper_kernel(T, weight, results or dtype, bias)

    monkeypatch.setattr(gated, "has_own_kernels", lambda x: True)
    assert taken() and taken(K=64) and taken(dtype=torch.float16)
    assert taken(T=MANY, dtype=FP8) and not taken(T=MANY - 1, dtype=FP8)
    assert not taken(T=MANY // 2 - 1) and not taken(N=384) and not taken(K=96)
    assert not taken(T=MANY, K=64, dtype=FP8) and not taken(dtype=torch.float32)
    assert not taken(bias=torch.empty(512)) and not taken(T=MANY, dtype=FP8, rows=128)
    assert not taken(T=MANY, dtype=FP8, results=torch.float32)
    assert not taken(T=MANY, dtype=torch.int8)
    weight = torch.empty(512, 128, dtype=torch.bfloat16)
    assert taken(T=ROWS[-1], dtype=FP8), "is rehearsed"
    products = []
    monkeypatch.setattr(gated_hopper, "hopper_gated", lambda x, *args: products.append(len(x)))
    x = torch.empty(MANY, 136, dtype=torch.bfloat16)
    for begin in (0, 1, 8):  # TMA wants rows that begin at multiples of 16 bytes
        gated.gated_product(x[:, begin : begin + 128], weight, x.dtype, None, False)
    assert products == [MANY] * 2
    monkeypatch.setattr(gated, "has_own_kernels", lambda x: False)
    assert not taken()
