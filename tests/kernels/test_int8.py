"""Products with weights in INT8, against float64 of the numbers that the codes mean."""

import pytest
import torch
from attention_cases import DEVICE

from checkpoints import rare

pytest.importorskip("triton")

from held_codes import count_rehearsed, record_launches

from nanovllm.compiling.rehearsal import ROWS
from nanovllm.kernels.device_features import has_room
from nanovllm.kernels.products import int8_linear
from nanovllm.kernels.products.int8_linear import (
    MAX_INPUTS,
    can_multiply,
    choose_tiles,
    in_bytes,
    linear_into,
)
from nanovllm.layers.weights.int8_head import Int8Head
from nanovllm.tensors.fp8 import Codes

SEED = 6
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # as the interpreter, whose is exact
UNIT = 2.0**-8 if DEVICE == "cuda" else 2.0**-11  # of its roundings


def randn(*shape: int, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, HALF)


def weight_of(N: int, K: int) -> Codes:
    codes = torch.randint(-127, 128, (N, K), generator=torch.Generator().manual_seed(1))
    scales = torch.exp(randn(N, 1, seed=2).float()) / (70 * K**0.5)
    return Codes(codes.to(DEVICE, torch.int8), scales, (1, K))


@pytest.mark.parametrize(
    ("T", "N", "K"),
    [
        (1, 300, 528),
        (3, 64, 128),
        (8, 70, 2064),
        (20, 192, 272),
        (40, 130, 144),
        rare(150, 200, 512),
    ],
)
def test_products(T: int, N: int, K: int) -> None:
    """Integers are added exactly; a number errs by half of 2 ** -15 of its row's largest, which
    here is far larger than the others, as with outliers.
    """
    x, weight = randn(T, K + 8)[:, :K], weight_of(N, K)
    x[:, 5] *= 30
    out = torch.full((T, N), torch.nan, dtype=HALF, device=DEVICE)
    linear_into(out, x, weight)
    numbers, matrix = x.double(), weight.numbers().double()
    wanted = numbers @ matrix.T
    most = numbers.abs().amax(1, keepdim=True) * matrix.abs().sum(1)
    error, bound = (out.double() - wanted).abs(), 2.0**-16 * most + 1.01 * UNIT * wanted.abs()
    assert (error <= bound * 1.01).all(), (error / bound).max()


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**12])
def test_activations_are_the_nearest_integers(size: float) -> None:
    """Activations of 16 bits, scaled by the largest of a row."""
    x = randn(5, 400)[:, :330] * size
    codes, scales = in_bytes(x)
    integers = 256 * codes[::2].long() + codes[1::2].long()
    assert integers.abs().amax(1).tolist() == [32639] * 5
    error = (integers * scales[:, None].double() - x.double()).abs()
    assert (error <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize("room", [True, False], ids=["", "no room"])
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("value", [torch.nan, rare(torch.inf), -torch.inf])
def test_what_is_no_number_stays_none(
    value: float, T: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the tiles of GPUs without TMA, or without the room for the others."""
    if not room:
        monkeypatch.setattr(int8_linear, "has_room", lambda _: False)
        monkeypatch.setattr(int8_linear, "can_describe", lambda _: False)
    x, weight = randn(T, 512), weight_of(64, 512)
    x[0, 300] = value
    out = torch.zeros(T, 64, dtype=HALF, device=DEVICE)
    linear_into(out, x, weight)
    assert not out[0].isfinite().any()
    wanted = x[1:].double() @ weight.numbers().double().T
    torch.testing.assert_close(out[1:].double(), wanted, rtol=1.01 * UNIT, atol=1e-2)


@pytest.mark.parametrize(
    ("T", "N", "K", "partial"),
    [(1, 70, 272, False), (2, 64, 512, True), (33, 130, 272, False), rare(300, 200, 512, True)],
)
@pytest.mark.parametrize("room", [True, False], ids=["", "no room"])
def test_products_of_integers_by_integers(
    T: int, N: int, K: int, partial: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a row's activations, of which one is far larger than the others, are added exactly.
    A single row is not quantised.
    """
    if not room:
        monkeypatch.setattr(int8_linear, "has_room", lambda _: False)
        monkeypatch.setattr(int8_linear, "can_describe", lambda _: False)
    x, weight, bias = randn(T, K + 8)[:, :K], weight_of(N, K), randn(N, seed=9)
    x[:, 5] *= 30
    numbers = x.double()
    if T > 1:
        x_scales = numbers.abs().amax(1, keepdim=True) / 127
        numbers = (numbers / x_scales).round() * x_scales
    wanted = numbers @ weight.numbers().double().T + bias.double()
    out = int8_linear.linear(x, weight, HALF, bias, partial)
    assert (out.dim() == 3) == (partial and T <= int8_linear.MANY_ROWS)
    if out.dim() == 3:
        assert len(out) > 1 and out.dtype == torch.float32
        out = out.sum(0).to(HALF)
    # A few activations are rounded to the other side.
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error < 2 * UNIT, error / UNIT


def test_zeros() -> None:
    out = torch.full((2, 64), torch.nan, dtype=HALF, device=DEVICE)
    linear_into(out, randn(2, 128) * 0, weight_of(64, 128))
    assert not out.any()
    assert (in_bytes(randn(2, 128) * 0)[1] > 0).all()


def test_products_of_every_number_of_rows_are_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And all their tiles fit a multiprocessor of Hopper."""
    launched = record_launches(monkeypatch, {int8_linear: "_int8_tiles_kernel"})
    rows = torch.empty(2 * ROWS[-1], 512, dtype=torch.int8, device=DEVICE)
    monkeypatch.setattr(
        int8_linear, "in_bytes", lambda x: (rows[: 2 * len(x)], torch.empty(len(x), device=DEVICE))
    )
    with torch.device(DEVICE):
        held = Int8Head(1024, 512, HALF)

    def multiply(T: int) -> None:
        held.multiply(torch.empty(T, 512, dtype=HALF, device=DEVICE))
        tiles = choose_tiles(T, has_room(held.data))
        assert (2 * tiles.block_t + tiles.block_n) * tiles.block_k * tiles.stages <= 220 << 10

    assert count_rehearsed(launched, multiply) > 2


def test_what_no_kernel_multiplies() -> None:
    device = torch.device(DEVICE)
    assert can_multiply(device, HALF, 4096)
    assert not can_multiply(device, torch.float32, 4096)
    assert not can_multiply(device, HALF, 4088), "rows begin at multiples of 16 bytes"
    assert can_multiply(device, HALF, MAX_INPUTS)
    assert not can_multiply(device, HALF, MAX_INPUTS + 16), "sums may not fit into int32"
