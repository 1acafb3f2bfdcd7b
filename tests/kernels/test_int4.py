"""Products with weights in 4 bits, against float64 of the numbers that the codes mean."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import DEVICE, needs_hopper

pytest.importorskip("triton")

from held_codes import HeldCodes, count_rehearsed, record_launches

from checkpoints import rare
from nanovllm.checkpoint.int4 import Int4
from nanovllm.compiling.rehearsal import ROWS
from nanovllm.kernels import device_features
from nanovllm.kernels.activation import act_and_mul
from nanovllm.kernels.device_features import has_room
from nanovllm.kernels.products import int4_linear, int4_row
from nanovllm.kernels.products import linear as kernels_linear
from nanovllm.kernels.products.int4_linear import (
    FEW_ROWS,
    can_multiply,
    choose_hopper_tiles,
    choose_tiles,
    has_tiles,
    linear,
    multiply_into,
    numbers_of,
)
from nanovllm.kernels.products.tiles import Tiles
from nanovllm.layers.weights.int4 import Int4Weight
from nanovllm.layers.weights.weight import Gate
from nanovllm.tensors.int4 import OFFSETS, Int4Codes, pack, plane_size, unpack
from nanovllm.utils.device import num_multiprocessors

SEED = 4
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # as the interpreter, whose is exact
UNIT = torch.finfo(HALF).eps / 2  # the error of rounding to it
DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [HALF]


def randn(*shape: int, seed: int = SEED, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def weight_of(
    N: int, K: int, group: int, dtype: torch.dtype = HALF
) -> tuple[Int4Codes, torch.Tensor]:
    """All codes and zero points, scales that differ widely; and the numbers, in float64."""
    generator = torch.Generator().manual_seed(SEED)
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (N, K // group), generator=generator)
    scales = (torch.exp(torch.randn(N, K // group, generator=generator)) / K**0.5).to(dtype)
    minus = -(zeros + OFFSETS[dtype]).to(dtype)
    halves = torch.stack([minus.T, scales.T], 2).contiguous()
    wide = codes.double().view(N, -1, group) - zeros[..., None]
    numbers = (wide * scales.double()[..., None]).view(N, K)
    data = pack(codes, plane_size(K, group))
    assert unpack(data, plane_size(K, group)).equal(codes)
    return Int4Codes(data.to(DEVICE), halves.to(DEVICE), group), numbers.to(DEVICE)


def check_product(
    out: torch.Tensor,
    x: torch.Tensor,
    numbers: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype = HALF,
    plane: int = 8,
) -> None:
    """Numbers, of tiles, and results are rounded to 16 bits; sums are float32."""
    unit = torch.finfo(dtype).eps / 2
    wanted, most = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    if bias is not None:
        wanted += bias
    if out.dim() == 3:
        assert out.dtype == torch.float32
        out = out.sum(0)
    least = unit * most
    if len(x) == 1:  # integers of 16 bits by the largest of 2 P numbers, and sums in float32
        parts = numbers.abs().view(len(numbers), -1, 2 * plane).sum(2)
        largest = x.double().abs().view(-1, 2 * plane).amax(1)
        least = 2.0**-16 * parts @ largest + 2.0**-20 * most
    error, bound = (out.double() - wanted).abs(), 1.1 * (least + unit * wanted.abs())
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "N", "K", "group", "partial", "has_bias"),
    [
        (1, 48, 1280, 128, False, True),
        (1, 16, 4224, 64, False, False),  # not all at once
        (1, 16, 8192, 128, True, True),
        (1, 80, 192, 32, False, False),
        (2, 64, 512, 128, False, True),
        (17, 64, 1024, 128, True, True),
        (33, 128, 384, 128, False, False),  # planes of 32
        (9, 64, 768, 64, False, False),
        (5, 64, 512, 32, True, False),
        (6, 64, 320, 64, False, True),  # planes of 16, in groups of 64
        (70, 128, 512, 128, True, False),
        (20, 144, 256, 32, True, True),  # no whole tiles
        rare(256, 4096, 1024, 128, True, True),
        rare(300, 4096, 1024, 128, True, True),
    ],
)
def test_products(
    T: int, N: int, K: int, group: int, partial: bool, has_bias: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_features, "own_kernels", False)
    x = randn(T, K + 8, dtype=dtype)[:, :K]
    x[:, 17] *= 1000  # a single group has it
    x[:, -64:] = 0
    weight, numbers = weight_of(N, K, group, dtype)
    bias = randn(N, seed=5, dtype=dtype) if has_bias else None
    assert can_multiply(weight, dtype)
    out = linear(x, weight, dtype, bias, partial)
    tiles = choose_tiles(T, N, K, weight.plane, partial, has_room(x)) if T > 1 else None
    splits = tiles.splits if tiles else 2 if T == 1 and partial else 1
    assert out.shape == ((splits, T, N) if splits > 1 else (T, N))
    assert splits > 1 or not partial or N % 64 or T > 256
    check_product(out, x, numbers, bias, dtype, weight.plane)
    if T > 1:
        whole = out.new_empty(T, N, dtype=dtype)
        multiply_into(whole, x, weight, bias)
        check_product(whole, x, numbers, bias, dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("T", "N", "K", "group", "tiles"),
    [
        (5, 256, 1024, 128, (16, 1, 4)),  # each part of the sum has one stage
        (20, 512, 896, 64, (32, 2, 1)),  # planes of 32, and half a stage
        (60, 256, 1024, 128, (64, 2, 2)),
        (65, 128, 384, 128, (64, 1, 1)),  # planes of 32, and fewer items than multiprocessors
        (200, 256, 512, 64, (128, 1, 2)),
        (200, 512, 1024, 128, (128, 2, 4)),  # each part of the sum has one chunk of columns
        (130, 1280, 4096, 128, (64, 2, 1)),
        (3000, 2560, 1024, 128, (128, 2, 1)),  # many items of each multiprocessor
        (1100, 1280, 32768, 1024, None),  # more rows than stay in the cache
        (128, 6144, 4096, 128, None),
    ],
)
def test_rows_on_hopper(
    T: int,
    N: int,
    K: int,
    group: int,
    tiles: tuple[int, int, int] | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows beyond the last are NaN, and results nobody wrote, too."""
    from nanovllm.kernels.products.hopper_int4 import hopper_int4

    x = randn(T + 200, K, dtype=dtype)
    x[T:] = torch.nan
    x, (weight, numbers) = x[:T], weight_of(N, K, group, dtype)
    bias = randn(N, seed=5, dtype=dtype)
    assert int4_linear.takes_hopper_kernel(x, weight) == (T > FEW_ROWS)  # the weights are small
    used = choose_hopper_tiles(T, N, K, num_multiprocessors(x.device.index), partial=True)
    if tiles:
        used = Tiles(tiles[0], 128 * tiles[1], 256, tiles[2])
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, torch.nan, **how))
    out = hopper_int4(x, weight, bias, tiles=used)
    check_product(out, x, numbers, bias, dtype)
    assert out.shape == ((used.splits, T, N) if used.splits > 1 else (T, N))
    if N % 256 == 0 and (tiles is None or tiles[1:] == (2, 1)):
        whole = used._replace(block_n=256, splits=1)
        for gelu, of_all in ((False, None), (True, bias)):
            gated = hopper_int4(x, weight, of_all, gelu=gelu, tiles=whole)
            gates, ups = (x.double() @ numbers.T + (0 if of_all is None else bias)).chunk(2, 1)
            act = F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)
            most = x.double().abs() @ numbers.abs().T
            unit, (of_gates, of_ups) = torch.finfo(dtype).eps / 2, most.chunk(2, 1)
            bound = 1.2 * unit * (1.13 * of_gates * ups.abs() + of_ups * gates.abs())
            bound += unit**2 * of_gates * of_ups + unit * (act * ups).abs() + 1e-6
            assert ((gated.double() - act * ups).abs() <= bound).all()


@pytest.mark.gpu
@needs_hopper
def test_a_weight_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in a buffer, and gated."""
    from nanovllm.kernels.products import hopper_int4 as on_hopper

    weight, numbers = weight_of(512, 1024, 128, torch.bfloat16)
    with torch.device(DEVICE):
        held = Int4Weight(512, 1024, torch.bfloat16, True, Int4(128, "", "", ""))
    held.data.data, held.scales.data = weight.data, weight.scales
    x, calls = randn(70, 1024, dtype=torch.bfloat16), []

    def spy(*args: Any, **how: Any) -> torch.Tensor:
        calls.append(how)
        return product(*args, **how)

    product = on_hopper.hopper_int4
    monkeypatch.setattr(on_hopper, "hopper_int4", spy)
    check_product(held.multiply(x), x, numbers, None, torch.bfloat16)
    out = x.new_empty(70, 512)
    assert held.multiply(x, out=out) is out
    check_product(out, x, numbers, None, torch.bfloat16)
    check = act_and_mul(held.multiply(x))
    torch.testing.assert_close(held.multiply(x, gate=Gate()), check, rtol=2e-2, atol=1e-2)
    assert len(calls) == 4 and calls[-1]["gelu"] is False


WEIGHTS_OF = [  # M, I, rows of queries, rows of keys and values
    (1024, 3072, 2048, 2048),
    (2560, 9728, 4096, 2048),
    (4096, 12288, 4096, 2048),
    (5120, 25600, 8192, 2048),
    (3584, 18944, 3584, 1024),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("M", "I", "Q", "KV"), WEIGHTS_OF)
def test_tiles_on_hopper(M: int, I: int, Q: int, KV: int, ranks: int) -> None:
    """Tiles fit weights, most multiprocessors have some, and a rehearsal uses all of their
    variants.
    """
    weights = [
        ((Q + KV) // ranks, M, False, False),
        (M, Q // ranks, True, False),
        (2 * I // ranks, M, False, True),
        (M, I // ranks, True, False),
    ]

    def variants(T: int) -> set[tuple[object, ...]]:
        found: set[tuple[object, ...]] = set()
        for N, K, partial, gated in weights:
            P = plane_size(K, 128)
            if N % (256 if gated else 128) or P < 32:
                continue
            if not has_tiles(T, N, K, 132, partial, gated):
                assert T <= FEW_ROWS
                continue
            tiles = choose_hopper_tiles(T, N, K, 132, partial, gated)
            assert N % tiles.block_n == 0 and -(-K // 256) % tiles.splits == 0
            assert (tiles.block_n == 256 or not gated) and (partial or tiles.splits == 1)
            at_least = 64 if T <= FEW_ROWS else min(48, N // 128)
            assert math.prod(tiles.grid(T, N)) >= at_least, (T, N, K)
            found.add((tiles.block_t, tiles.block_n, tiles.splits > 1, gated, P))
        return found

    rehearsed = set().union(*(variants(T) for T in ROWS if T > 1))
    assert all(variants(T) <= rehearsed for T in range(2, 3000)) and rehearsed


BLOCKS, STEPS, BOTH = (256, 4096, 3), (512, 256, 396), (768, 256, 3)
USUAL = [(*BLOCKS, ""), (*STEPS, "partial"), (*BOTH, ""), (*BOTH, "gated")]
EACH = [(*shape, way) for shape in (BLOCKS, STEPS, BOTH) for way in ("", "partial", "gated")]


@pytest.mark.parametrize(
    ("K", "block_k", "programs", "way"),
    [each if each in USUAL else rare(*each) for each in EACH],
)
def test_a_program_for_one_row_has_several(
    K: int, block_k: int, programs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data loaded ahead belongs to the next step, or to the next block."""
    for name in ("BLOCKS", "GATED_BLOCKS"):
        monkeypatch.setattr(int4_row, name, (8, programs, None))
    monkeypatch.setattr(int4_row, "BLOCK_K", block_k)
    N = 2 * 80
    x, (weight, numbers), bias = randn(1, K), weight_of(N, K, 64), randn(N, seed=5)
    if way != "gated":
        out = linear(x, weight, HALF, bias, way == "partial")
        assert out.dim() == (3 if way and block_k < K else 2)
        check_product(out, x, numbers, bias, plane=weight.plane)
        return
    out = int4_row.one_row(x, weight, bias, gated=True)
    wanted = act_and_mul((x.double() @ numbers.T + bias).float(), False)
    torch.testing.assert_close(out.float(), wanted, rtol=8 * UNIT, atol=8 * UNIT)


@pytest.mark.parametrize("T", [1, 2, 300])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(value: float, T: int) -> None:
    x, (weight, _) = randn(T, 512), weight_of(64, 512, 64)
    x[0, 300] = value
    out = linear(x, weight, HALF)
    if T > 1:
        assert out[1:].isfinite().all()
    assert not out[0].isfinite().any()


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("T", [1, 3])
def test_gated_products(T: int, gelu: bool, has_bias: bool) -> None:
    x, (weight, numbers) = randn(T, 256), weight_of(2 * 64, 256, 64)
    bias = randn(128, seed=5) if has_bias else None
    out = HeldCodes(weight, HALF, int4_linear).multiply(x, bias, gate=Gate(gelu))
    assert isinstance(out, torch.Tensor)
    if T > 1:
        assert out.equal(act_and_mul(linear(x, weight, HALF, bias), gelu))
        return
    wide = x.double() @ numbers.T  # nothing is rounded to 16 bits between
    wanted = act_and_mul((wide + bias if has_bias else wide).float(), gelu)
    torch.testing.assert_close(out.float(), wanted, rtol=8 * UNIT, atol=8 * UNIT)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_library_gets_the_numbers(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to 16 bits, a part of the rows at a time."""
    weight, numbers = weight_of(48, 384, group)
    assert numbers_of(weight, HALF, 16, 48).equal(numbers[16:].to(HALF))
    torch.testing.assert_close(weight.numbers().double(), numbers, rtol=1e-6, atol=0)
    x, seen = randn(4, 384), []
    monkeypatch.setattr(kernels_linear, "PART", 16 * 384)
    monkeypatch.setattr(
        int4_linear, "numbers_of", lambda *args: seen.append(args[2:]) or numbers_of(*args)
    )
    whole, bias = x.new_empty(4, 48), randn(48, seed=5)
    multiply_into(whole, x, weight, bias)
    assert seen == [(0, 16), (16, 32), (32, 48)]
    check_product(whole, x, numbers, bias)


def test_products_of_every_number_of_rows_are_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_features, "own_kernels", False)
    launched = record_launches(
        monkeypatch, {int4_linear: "_int4_tiles_kernel", int4_row: "_int4_row_kernel"}
    )
    monkeypatch.setattr(int4_linear, "multiply_into", lambda out, x, weight, bias: None)
    for N, K in ((192, 1024), (6144, 1024), (128, 1024)):
        weight = Int4Codes(
            torch.empty(N, K // 4, dtype=torch.int16, device=DEVICE),
            torch.empty(K // 128, N, 2, dtype=HALF, device=DEVICE),
            128,
        )
        for partial in (False, True):

            def multiply(T: int, weight: Int4Codes = weight, partial: bool = partial) -> None:
                x = torch.empty(T, weight.shape[1], dtype=HALF, device=DEVICE)
                linear(x, weight, HALF, None, partial)

            assert count_rehearsed(launched, multiply) >= 4


def test_what_no_kernel_multiplies() -> None:
    assert not can_multiply(weight_of(16, 128, 64)[0], torch.float32)
    assert not can_multiply(weight_of(24, 128, 64)[0], HALF)  # rows are unpacked by 16
    assert not can_multiply(weight_of(16, 96, 32)[0], HALF)  # planes of 8
