"""Activations and products in FP8, against float64 of the numbers that the codes mean."""

import pytest
import torch
from attention_cases import DEVICE

pytest.importorskip("triton")

from held_codes import HeldCodes, count_rehearsed, record_launches

from checkpoints import rare
from nanovllm.kernels.activation import act_and_mul, quantized_act_and_mul
from nanovllm.kernels.device_features import can_describe
from nanovllm.kernels.fp8 import empty_codes, quantize
from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.kernels.products import fp8_half, fp8_linear, fp8_row
from nanovllm.kernels.products import linear as kernels_linear
from nanovllm.kernels.products.fp8_linear import choose_tiles, linear, multiply_into
from nanovllm.kernels.products.tiles import Tiles
from nanovllm.layers.weights.weight import Gate
from nanovllm.tensors.fp8 import FP8, LARGEST, Codes

SEED = 8
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # as the interpreter, whose is exact
X_BLOCKS = pytest.mark.parametrize("act_block", [0, 128])


def randn(*shape: int, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, HALF)


def weight_of(N: int, K: int, act_block: int) -> Codes:
    """Codes with scales of rows, or of blocks of 128 x 128, that differ widely."""
    codes = (randn(N, K, seed=1) * 100).clamp(-LARGEST, LARGEST).to(FP8)
    counts = (-(-N // 128), -(-K // 128)) if act_block else (N, 1)
    scales = torch.exp(randn(*counts, seed=2).float()) / (100 * K**0.5)
    return Codes(codes, scales, (128, 128) if act_block else (1, K))


def check_codes(codes: Codes, numbers: torch.Tensor, act_block: int) -> None:
    """Three bits of mantissa, down to 2 ** -9 of a scale, which is that of the largest number."""
    T, K = numbers.shape
    numbers = numbers.float()
    assert codes.codes.dtype == FP8 and codes.block == (1, act_block or K)
    padded = torch.nn.functional.pad(numbers, (0, -K % act_block if act_block else 0))
    scales = padded.view(T, -1, act_block or K).abs().amax(2) / LARGEST
    torch.testing.assert_close(codes.scales, scales.clamp(min=2.0**-100), rtol=1e-6, atol=0)
    scales = scales.repeat_interleave(act_block or K, 1)[:, :K]
    error, bound = (codes.numbers() - numbers).abs(), 2.0**-4 * numbers.abs() + 2.0**-10 * scales
    assert (error <= bound * (1 + 1e-5)).all(), (error - bound).max()


@X_BLOCKS
def test_a_row_has_scales_of_its_own(act_block: int) -> None:
    x = randn(5, 360)[:, :330] * torch.logspace(-3, 3, 5, device=DEVICE)[:, None].to(HALF)
    x[3, :200] = 0
    check_codes(quantize(x, act_block), x, act_block)


@X_BLOCKS
@pytest.mark.parametrize("parts", [0, 2])
def test_norms_and_activations_quantise_what_they_give_otherwise(
    parts: int, act_block: int
) -> None:
    """All but a single row."""
    x, residual, weight = randn(3, 264), randn(3, 264, seed=1), randn(264, seed=2)
    if parts:
        x = torch.stack([x.float() * (i + 1) for i in range(parts)])
    wanted, wanted_sum = add_rms_norm(x, residual, weight, 1e-6)
    codes, total = add_rms_norm(x, residual, weight, 1e-6, act_block=act_block)
    assert isinstance(codes, Codes) and isinstance(wanted, torch.Tensor)
    check_codes(codes, wanted, act_block)
    assert total.equal(wanted_sum)
    one, _ = add_rms_norm(x[..., :1, :], residual[:1], weight, 1e-6, act_block=act_block)
    assert isinstance(one, torch.Tensor) and one.equal(wanted[:1])
    gate_up = randn(4, 2 * 1200)
    check_codes(quantized_act_and_mul(gate_up, False, act_block), act_and_mul(gate_up), act_block)
    assert rms_norm(residual, weight, 1e-6).dtype == HALF


def check_product(
    out: torch.Tensor, x: torch.Tensor | Codes, weight: Codes, bias: torch.Tensor | None
) -> None:
    """Tensor cores add with 13 bits after the largest of some numbers (DeepSeek-V3's report, 2024,
    3.3.2), and results are rounded to 16 bits.
    """
    numbers = (x.numbers() if isinstance(x, Codes) else x).double()
    matrix = weight.numbers().double()
    wanted, most = numbers @ matrix.T, numbers.abs() @ matrix.abs().T
    if bias is not None:
        wanted += bias
    if out.dim() == 3:
        assert out.dtype == torch.float32
        out = out.sum(0)
    error, bound = (out.double() - wanted).abs(), 2.0**-9 * most + 2.0**-8 * wanted.abs()
    assert (error <= bound).all(), (error / bound).max()


PRODUCTS = [
    (1, 80, 528, False, True),
    (1, 70, 5000, False, False),  # a row in two steps
    (1, 70, 5000, True, True),  # and in two parts
    (2, 64, 512, False, True),
    (17, 192, 1024, True, False),
    (40, 128, 512, True, True),
    (130, 64, 512, True, True),
    (130, 128, 512, False, True),  # a tile and 32 more rows
    (170, 64, 512, True, False),  # and 64
    (200, 64, 512, False, True),  # more rows than tiles are for
    (20, 144, 272, True, False),  # no whole tiles
    (256, 4096, 1024, True, True),
]


@pytest.mark.parametrize(
    ("T", "N", "K", "partial", "has_bias", "act_block"),
    [
        # With blocks, more rows than a tile has are more tiles.
        rare(*case, act_block)
        if case[0] == 256 or act_block * case[0] > 128 * 128
        else (*case, act_block)
        for case in PRODUCTS
        for act_block in (0, 128)
    ],
)
def test_products(T: int, N: int, K: int, partial: bool, has_bias: bool, act_block: int) -> None:
    x, weight = randn(T, K + 8)[:, :K], weight_of(N, K, act_block)
    bias = randn(N, seed=4) if has_bias else None
    out = linear(x, weight, HALF, bias, partial)
    tiles = choose_tiles(T, N, K, partial, act_block > 0)
    if T > 1 and tiles is not None and can_describe(weight.codes):
        assert tiles.more == (0 if act_block or not 128 < T <= 192 else 32 if T <= 160 else 64)
        assert out.dim() == (3 if tiles.splits > 1 else 2)
        assert tiles.splits > 1 or not partial or N == 4096
    given = x if T == 1 else quantize(x, act_block)
    check_product(out, given, weight, bias)
    if T > 1:
        assert isinstance(given, Codes)
        torch.testing.assert_close(linear(given, weight, HALF, bias, partial), out)
        whole = out.new_empty(T, N, dtype=HALF)
        multiply_into(whole, given, weight, bias)
        check_product(whole, given, weight, bias)
        part = slice(T // 2, T)
        check_product(linear(given[part], weight, HALF, bias), given[part], weight, bias)


@pytest.mark.parametrize(
    "T",
    [1, pytest.param(3, marks=pytest.mark.skipif(DEVICE == "cpu", reason="its e4m3 has no NaN"))],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(value: float, T: int) -> None:
    x, weight = randn(T, 512), weight_of(64, 512, 0)
    x[0, 300] = value
    out = linear(x, weight, HALF)
    assert out[1:].isfinite().all()
    assert not out[0].isfinite().any()


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_rows_of_any_size(power: int) -> None:
    """In a single row each eight inputs are scaled as their largest is."""
    if DEVICE == "cpu":  # in float16
        power //= 10
    x, weight = randn(1, 1024), weight_of(64, 1024, 0)
    x[:, 256:512] = 0
    x[:, 512:] *= 2.0**power
    check_product(linear(x, weight, HALF), x, weight, None)


def sizes_of(tiles: Tiles | None) -> tuple[int, ...]:
    assert tiles is not None
    return tuple(
        getattr(tiles, name)
        for name in ("block_t", "splits", "block_k", "stages", "block_n", "more")
    )


def test_tiles_of_the_8b_shape() -> None:
    """The measured tiles (docs/experiments.md, 38 and 39): rows, splits, inputs and stages,
    outputs, and more rows.
    """
    qkv, down, up = (6144, 4096, True, False), (4096, 12288, True, False), (24576, 4096, False)
    half_out, half_up = (4096, 2048, True, False), (12288, 4096, False, False)
    wanted = {
        (16, down): (16, 4, 256, 4, 64, 0),
        (32, qkv): (32, 2, 256, 4, 64, 0),
        (64, down): (64, 2, 256, 4, 64, 0),
        (64, (*up, False)): (64, 1, 128, 4, 64, 0),
        (128, down): (128, 2, 128, 6, 64, 0),
        (128, (*up, False)): (128, 1, 128, 3, 128, 0),
        (144, qkv): (128, 1, 128, 6, 64, 32),
        (160, (*up, False)): (128, 1, 128, 4, 64, 32),
        (192, (*up, False)): (128, 1, 128, 3, 64, 64),
        (192, down): (128, 2, 128, 6, 64, 64),
        (16, (*up, True)): (16, 1, 128, 8, 64, 0),  # scales of blocks
        (64, (*qkv[:3], True)): (64, 2, 128, 4, 64, 0),
        (32, (2560, 9728, True, False)): (32, 4, 128, 8, 64, 0),  # no tiles of 256 inputs
        (64, half_up): (64, 1, 128, 6, 64, 0),  # of two ranks
        (128, half_up): (128, 1, 128, 6, 128, 0),
        (128, half_out): (64, 1, 256, 4, 64, 0),
        (192, half_out): (128, 1, 128, 6, 64, 0),
        (65, half_out): (64, 1, 256, 4, 64, 0),
        (65, (*half_out[:3], True)): (128, 2, 128, 6, 64, 0),
        (128, (4096, 2560, True, False)): (128, 2, 128, 6, 64, 0),  # more inputs
        (128, (1024, 2048, True, False)): (128, 4, 128, 6, 64, 0),  # fewer programs
        (256, (2048, 2048, True, False)): (128, 2, 128, 6, 64, 0),
    }
    for (T, product), sizes in wanted.items():
        assert sizes_of(choose_tiles(T, *product)) == sizes, (T, product)
    assert choose_tiles(193, *up, False) is None and choose_tiles(129, *up, True) is None


@X_BLOCKS
def test_wide_tiles(act_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 outputs, where more programs would not run at once."""
    monkeypatch.setattr(fp8_linear, "ROOMY_PROGRAMS", 1)
    tiles = choose_tiles(100, 256, 512, False, act_block > 0)
    assert sizes_of(tiles) == (128, 1, 128, 3, 128, 0)
    x, weight = quantize(randn(100, 512), act_block), weight_of(256, 512, act_block)
    check_product(linear(x, weight, HALF), x, weight, None)


@X_BLOCKS
@pytest.mark.parametrize("library", [True, False], ids=["", "no library"])
def test_products_of_every_number_of_rows_are_rehearsed(
    library: bool, act_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all their tiles fit a multiprocessor of Hopper."""

    def empty(x: torch.Tensor, _: int) -> Codes:
        return empty_codes(*x.shape, act_block, x.device)

    launched = record_launches(
        monkeypatch, {fp8_linear: "_fp8_tiles_kernel", fp8_row: "_fp8_row_kernel"}
    )
    monkeypatch.setattr(fp8_linear, "quantize", empty)
    monkeypatch.setattr(fp8_linear, "_library_has", lambda weight: library)
    monkeypatch.setattr(fp8_linear, "_by_library", lambda x, *_: torch.empty(len(x), 1))
    for N, K in ((1024, 1024), (6144, 1024), (1024, 3072), (4096, 4096), (24576, 4096)):
        counts = (-(-N // 128), -(-K // 128)) if act_block else (N, 1)
        codes, scales = torch.empty(N, K, dtype=FP8, device=DEVICE), torch.empty(*counts)
        weight = Codes(codes, scales.to(DEVICE), (128, 128) if act_block else (1, K))
        for partial in (False, True):

            def multiply(T: int, weight: Codes = weight, partial: bool = partial) -> None:
                N, K = weight.codes.shape
                linear(torch.empty(T, K, dtype=HALF, device=DEVICE), weight, HALF, None, partial)
                if tiles := choose_tiles(T, N, K, partial, act_block > 0):
                    rows = tiles.block_t + tiles.more + tiles.block_n
                    assert rows * tiles.block_k * tiles.stages <= 220 << 10

            assert count_rehearsed(launched, multiply) >= 5 or not can_describe(codes)


@X_BLOCKS
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("T", [1, 5])
def test_gates(T: int, gelu: bool, act_block: int) -> None:
    x, weight, bias = randn(T, 512), weight_of(2 * 256, 512, act_block), randn(512, seed=4)
    out = HeldCodes(weight, HALF, fp8_linear).multiply(x, bias, gate=Gate(gelu, act_block))
    given = x if T == 1 else quantize(x, act_block).numbers()
    gate, up = (given.double() @ weight.numbers().double().T + bias).chunk(2, 1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    wanted = act * up
    if T > 1:
        assert isinstance(out, Codes) and out.block == (1, act_block or 256)
        out = out.numbers()
        assert (out.double() - wanted).norm() < 2.0**-5 * wanted.norm()  # of codes
    else:
        assert (out.double() - wanted).norm() < 2.0**-8 * wanted.norm()


def test_what_the_library_lacks_is_multiplied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on other GPUs than Hopper's; and there without tiles of ours."""
    x, weight = quantize(randn(150, 512), 128), weight_of(256, 512, 128)
    monkeypatch.setattr(fp8_linear, "_library_has", lambda weight: False)
    check_product(linear(x, weight, HALF), x, weight, None)
    monkeypatch.setattr(fp8_linear, "can_describe", lambda x: False)
    check_product(linear(x, weight, HALF), x, weight, None)


@X_BLOCKS
@pytest.mark.parametrize(
    ("T", "N", "K", "has_bias"),
    [(1, 80, 528, True), (17, 192, 256, False), (70, 64, 272, True), (260, 256, 384, True)],
)
@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs without FP8 products run it")
def test_products_in_16_bits(
    T: int, N: int, K: int, has_bias: bool, act_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_linear, "PART", 128 * K)
    x, weight = randn(T, K), weight_of(N, K, act_block)
    weight.codes.view(torch.uint8)[0, :256] = torch.arange(256, dtype=torch.uint8)  # all but NaN
    weight.codes.view(torch.uint8)[0, [127, 255]] = 0
    bias = randn(N, seed=4) if has_bias else None
    assert fp8_half.can_multiply(weight, HALF)
    out = fp8_half.linear(x, weight, HALF, bias, True)
    assert out.shape == (T, N)
    wide, matrix = x.double(), weight.numbers().double()
    wanted, most = wide @ matrix.T, wide.abs() @ matrix.abs().T
    if bias is not None:
        wanted += bias
    unit = torch.finfo(HALF).eps / 2  # of results; of many rows also of the weights
    bound = unit * wanted.abs() + (unit if T > fp8_half.MAX_ROWS else 2.0**-20) * most
    assert ((out.double() - wanted).abs() <= 1.1 * bound).all()
    if N % 128 == 0:
        gated = HeldCodes(weight, HALF, fp8_half).multiply(x, bias, gate=Gate())
        assert isinstance(gated, torch.Tensor) and gated.equal(act_and_mul(out))
