"""The kernels of a mixture of experts against float64."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, needs_hopper

from checkpoints import rare

pytest.importorskip("triton")

from nanovllm.compiling.rehearsal import ROWS
from nanovllm.kernels import device_features
from nanovllm.kernels.experts import gated_experts as experts_kernels
from nanovllm.kernels.experts import grouped
from nanovllm.kernels.experts import tiles as experts_tiles
from nanovllm.kernels.experts.gated_experts import LARGE_STEP, gated_experts
from nanovllm.kernels.experts.routing import SORTED, route
from nanovllm.kernels.experts.tiles import (
    FEW,
    MANY,
    MANY_IN_8_BITS,
    MANY_OF_4_BITS,
    SOME,
    Tiles,
    choose_rows,
    choose_tiles,
)
from nanovllm.kernels.experts.weights import ExpertWeights
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.tensors.int4 import OFFSETS, Int4Codes, pack, plane_size
from nanovllm.tensors.mxfp4 import Mxfp4Codes, packed, packed_exponents, quantize

SEED = 3
SMALL_TILES = Tiles(16, 16, 16, 16, 4, 2, left=True)  # several in each direction
ON_GPU = DEVICE == "cuda"
SLOW = pytest.mark.slow


def rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    """The values that FP8 has for x: [K] float64, if `block` of them share a scale; 0: all."""
    parts = x.split(block or len(x))
    scales = [part.abs().max() / 448 for part in parts]
    codes = [(part / scale).float().to(FP8) for part, scale in zip(parts, scales, strict=True)]
    return torch.cat([a.double() * b for a, b in zip(codes, scales, strict=True)])


def expected(
    x: torch.Tensor,
    w: ExpertWeights,
    experts: torch.Tensor,
    scales: torch.Tensor,
    x_block: int | None = None,
    inner_block: int = 0,
) -> torch.Tensor:
    """[T, M] float64, one token and expert at a time. With an `x_block` inputs and inner values are
    those of 8 bits, of which `x_block` and `inner_block` share a scale.
    """
    out, M = torch.zeros(*x.shape, dtype=torch.float64), x.shape[1]
    x = x.double().cpu()
    if x_block is not None:
        x = torch.stack([rounded(row, x_block) for row in x])
    gate_ups, downs = (
        (each if isinstance(each, torch.Tensor) else each.numbers()).double().cpu()
        for each in (w.gate_up, w.down)
    )
    I = downs.shape[1]
    gate_ups, downs = gate_ups.view(-1, 2 * I, M), downs.view(-1, M, I)
    for t in range(len(x)):
        for expert, scale in zip(experts[t].tolist(), scales[t].tolist(), strict=True):
            gate_up = gate_ups[expert] @ x[t]
            if w.gate_up_bias is not None:
                gate_up += w.gate_up_bias[expert].double().cpu()
            gate, up = gate_up.chunk(2)
            if w.limit:
                gate, up = gate.clamp(max=w.limit), up.clamp(-w.limit, w.limit)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            elif w.gelu:
                inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            else:
                inner = torch.nn.functional.silu(gate) * up
            if x_block is not None:
                inner = rounded(inner, inner_block)
            result = downs[expert] @ inner
            if w.down_bias is not None:
                result += w.down_bias[expert].double().cpu()
            out[t] += scale * result
    return out


@pytest.mark.parametrize(
    ("T", "k", "E", "I", "M", "tiles"),
    [
        (1, 3, 7, 48, 40, None),
        (5, 2, 7, 48, 40, SMALL_TILES),
        (33, 3, 5, 40, 72, SMALL_TILES),  # some experts have two tiles
        (40, 1, 8, 64, 64, FEW),
        (70, 4, 4, 160, 136, SOME),
        pytest.param(200, 4, 6, 200, 264, MANY, marks=SLOW),
    ],
)
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
def test_experts_are_those_of_float64(
    T: int, k: int, E: int, I: int, M: int, tiles: Tiles | None, limit: float, dtype: torch.dtype
) -> None:
    """With limits also biases; one expert is taken by all tokens, and one by none."""
    generator = torch.Generator().manual_seed(T)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    biases = (randn(E, 2 * I), randn(E, M)) if limit else (None, None)
    w = ExpertWeights(randn(E * 2 * I, M) / M**0.5, randn(E * M, I) / I**0.5, *biases, limit=limit)
    x, logits = randn(T, M), randn(T, E)
    logits[:, 0] += 8
    logits[:, -1] -= 8
    experts, scales = route(logits, k, norm=limit > 0)
    probabilities, chosen = logits.double().softmax(-1).topk(k)
    if limit:
        probabilities /= probabilities.sum(-1, keepdim=True)
    assert experts.tolist() == chosen.tolist()
    torch.testing.assert_close(scales.double(), probabilities, rtol=1e-5, atol=1e-7)
    out = gated_experts(x, w, experts, scales, tiles)
    assert out.shape == (k, T, M) and out.dtype == torch.float32
    wanted = expected(x, w, experts, scales)
    # Inner numbers are rounded to dtype once: half a unit in the last place of each, as noise.
    error = (out.double().sum(0).cpu() - wanted).norm() / wanted.norm()
    assert error < torch.finfo(dtype).eps, error


SCALES = [(1, 256), (128, 256), (128, 208)]  # of rows, of blocks, and with part of a block
SIZES = [(1, None), (9, SMALL_TILES), (30, FEW), (40, SOME), (99, MANY)]
SIZES_IN_8_BITS = [(9, SMALL_TILES), (70, None), (99, MANY_IN_8_BITS)]
CASES = [(*size, *scale, False) for size in SIZES for scale in SCALES]
CASES += [(*size, *scale, True) for size in SIZES_IN_8_BITS for scale in SCALES[:2]]
USUAL = [(1, 1, 256, False), (1, 128, 208, False), (9, 128, 208, False), (30, 128, 256, False)]
USUAL += [(40, 1, 256, False), (9, 1, 256, True), (70, 128, 256, True)]


@pytest.mark.parametrize(
    ("T", "tiles", "block", "M", "in_8_bits"),
    [case if (case[0], *case[2:]) in USUAL else rare(*case) for case in CASES],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
def test_experts_in_8_bits_are_those_of_float64(
    T: int,
    tiles: Tiles | None,
    block: int,
    M: int,
    in_8_bits: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scales of rows, or of blocks of 128 x 128, that differ up to 8 times; tokens in 8 bits, or in
    16 where they have to.
    """
    generator, (k, E, I) = torch.Generator().manual_seed(T), (2, 3, 128)
    if not in_8_bits:
        monkeypatch.setattr(grouped, "act_block", lambda *args: None)

    def codes(N: int, K: int) -> Codes:
        shape = (N, 1) if block == 1 else (-(-N // block), -(-K // block))
        scales = 2 ** (3 * torch.rand(shape, generator=generator)) / 8 / K**0.5
        numbers = torch.randn(N, K, generator=generator).clamp(-4, 4)
        size = 1 if block == 1 else block, K if block == 1 else block
        return Codes(numbers.to(DEVICE, FP8), scales.to(DEVICE), size)

    w = ExpertWeights(codes(E * 2 * I, M), codes(E * M, I))
    x = torch.randn(T, M, generator=generator).to(DEVICE, dtype)
    x *= torch.rand(T, 1, generator=generator).to(x) * 8  # rows have scales of their own
    experts, scales = route(x[:, :E], k, norm=True)
    out = gated_experts(x, w, experts, scales, tiles)
    used = tiles or choose_tiles(T * k, E, x, 8, 8 if in_8_bits else 16, block > 1)
    blocks = (0 if block == 1 else block, used.block_i) if in_8_bits else ()
    wanted = expected(x, w, experts, scales, *blocks)
    # Weights are rounded to dtype on their way to tensor cores, and inner numbers after them. Of
    # inner numbers in 8 bits a few fall to the other side of a rounding.
    error = (out.double().sum(0).cpu() - wanted).norm() / wanted.norm()
    assert error < (2e-3 if in_8_bits else torch.finfo(dtype).eps), error


def in_4_bits(
    numbers: torch.Tensor, group: int, dtype: torch.dtype = torch.float16
) -> Int4Codes | Mxfp4Codes:
    """Numbers in MXFP4, or with a group in INT4, with zero points."""
    N, K = numbers.shape
    if not group:
        codes, exponents = quantize(numbers)
        return Mxfp4Codes(packed(codes).to(DEVICE), packed_exponents(exponents).to(DEVICE), K)
    groups = numbers.view(N, -1, group)
    scale, zero = groups.abs().amax(2) / 6, (6 + torch.arange(N * K // group) % 4).view(N, -1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8)
    words = torch.stack([-(zero + OFFSETS[dtype]), scale], -1).transpose(0, 1)
    data = pack(codes.view(N, K), plane_size(K, group))
    return Int4Codes(data.to(DEVICE), words.contiguous().to(DEVICE, dtype), group)


SMALL_4_BITS = SMALL_TILES._replace(block_i=32, block_m=64)
IN_4_BITS = [(1, None), (9, SMALL_4_BITS), (60, None), (99, MANY_OF_4_BITS)]


@pytest.mark.parametrize(
    ("T", "tiles", "group"),
    [
        case if case[0] in (1, 9) and case[2] in (0, 128) else rare(*case)
        for case in [(*size, group) for size in IN_4_BITS for group in (0, 32, 128)]
    ],
)
def test_experts_in_4_bits_are_those_of_float64(T: int, tiles: Tiles | None, group: int) -> None:
    """MXFP4 also where columns are no multiple of a chunk; INT4 with zero points."""
    generator, k, E = torch.Generator().manual_seed(T), 2, 3
    I, M = (256, 512) if group == 128 else (128, 192) if group else (96, 160)

    def randn(*shape: int) -> torch.Tensor:
        rows = 2.0 ** torch.randint(-3, 4, (shape[0], 1), generator=generator)
        return torch.randn(*shape, generator=generator) * rows

    weights = (in_4_bits(randn(*s) / s[1] ** 0.5, group) for s in ((E * 2 * I, M), (E * M, I)))
    biases = [randn(E, n).to(DEVICE, torch.float16) for n in (2 * I, M)]
    w = ExpertWeights(*weights, *biases, limit=7.0)
    x = torch.randn(T, M, generator=generator).to(DEVICE, torch.float16)
    experts, scales = route(x[:, :E], k, norm=True)
    out = gated_experts(x, w, experts, scales, tiles)
    wanted = expected(x, w, experts, scales)
    error = (out.double().sum(0).cpu() - wanted).norm() / wanted.norm()
    assert error < torch.finfo(torch.float16).eps, error


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("T", "k", "E", "I", "M", "group"),
    [
        (1, 4, 32, 2880, 416, 0),
        (1, 3, 5, 256, 512, 128),
        (2, 4, 32, 96, 160, 0),  # columns that are no whole chunk, and experts without tokens
        (70, 4, 5, 2880, 2880, 0),  # tiles that are not whole, of rows and of outputs
        (50, 2, 3, 256, 512, 128),  # planes of 64
        (60, 3, 130, 128, 384, 64),  # planes of 32; more experts than a group has threads
        (700, 8, 40, 256, 256, 0),  # tiles of 128 rows; more items than multiprocessors
        (700, 8, 40, 320, 320, 0),  # whose last stage has a quarter of its columns
        (700, 2, 8, 256, 896, 128),
    ],
)
@pytest.mark.parametrize("gelu", [False, True])
def test_packed_experts_on_hopper(
    T: int,
    k: int,
    E: int,
    I: int,
    M: int,
    group: int,
    gelu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With limits and biases, too; results that nobody has written are NaN."""
    from nanovllm.kernels.experts import hopper_experts

    generator, dtype = torch.Generator().manual_seed(T), torch.bfloat16

    def randn(*shape: int) -> torch.Tensor:
        rows = 2.0 ** torch.randint(-3, 4, (shape[0], 1), generator=generator)
        return torch.randn(*shape, generator=generator) * rows

    shapes = ((E * 2 * I, M), (E * M, I))
    weights = (in_4_bits(randn(*s) / s[1] ** 0.5, group, dtype) for s in shapes)
    biases = [None if gelu else randn(E, n).to(DEVICE, dtype) for n in (2 * I, M)]
    w = ExpertWeights(*weights, *biases, gelu=gelu, limit=0.0 if gelu else 7.0)
    logits = torch.randn(T, E, generator=generator)
    logits[:, 0] += 4
    x = torch.randn(T, M, generator=generator).to(DEVICE, dtype)
    experts, scales = route(logits.to(DEVICE), k, norm=True)
    monkeypatch.setattr(experts_kernels, "FEW_PAIRS", {})
    assert experts_kernels.takes_hopper_kernel(x, w, k)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, torch.nan, **how))
    monkeypatch.setattr(hopper_experts, "sort_pairs", sorted_pairs)
    out = gated_experts(x, w, experts, scales)
    monkeypatch.undo()
    assert out.shape == (k, T, M)
    wanted = expected(x, w, experts, scales)
    error = (out.double().sum(0).cpu() - wanted).norm() / wanted.norm()
    assert error < torch.finfo(dtype).eps, error
    monkeypatch.setattr(device_features, "own_kernels", False)
    others = gated_experts(x, w, experts, scales).double().sum(0).cpu()
    assert (others - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


def sorted_pairs(experts: torch.Tensor, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sort_pairs` by PyTorch."""
    ids = experts.flatten()
    ends = torch.bincount(ids, minlength=E).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    return ids.argsort(stable=True).int(), starts.int()


@pytest.mark.parametrize(
    ("bits", "of_ring"),
    [
        *[((16, 16), None), ((8, 16), None), ((8, 8), None), ((8, 8, True), None)],
        *[((4, 16, False, 32), Mxfp4Codes), ((4, 16, False, 64), Int4Codes)],
    ],
)
@pytest.mark.parametrize(("k", "E"), [(2, 8), (8, 64), (8, 128), (4, 32), (4, 128)])
def test_products_of_every_number_of_tokens_are_rehearsed(
    k: int,
    E: int,
    bits: tuple[int, ...],
    of_ring: type | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of Mixtral, OLMoE, Qwen3 and gpt-oss, on a GPU with room for large tiles, and those
    of which Hopper has some by a ring.
    """
    monkeypatch.setattr(experts_tiles, "has_room", lambda x: True)
    x = torch.zeros(1, 1, dtype=torch.float16, device=DEVICE)
    few = experts_kernels.FEW_PAIRS[of_ring] if of_ring else math.inf

    def of(numbers: Iterable[int]) -> list[set[Any]]:
        several = [(T, T * k) for T in numbers if T > 1]
        return [
            {(choose_tiles(N, E, x, *bits), T < LARGE_STEP) for T, N in several},
            {
                (choose_rows(N, E) if few * E < N else choose_tiles(N, E, x, *bits), T < LARGE_STEP)
                for T, N in several
            },
            {next((size for size in SORTED if size >= N), SORTED[-1]) for _, N in several},
        ]

    for budget in (1000, 4 * ROWS[-1]):  # tokens of the largest step, which is rehearsed, too
        rehearsed = [T for T in (*ROWS, budget) if budget >= T]
        assert of(rehearsed) == of(range(budget + 1))


def test_partial_results_of_large_steps_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_kernels, "LARGE_STEP", 40)
    x, gate_up, down = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(SEED)).to(DEVICE, torch.float16)
        for shape in ((40, 32), (4 * 32, 32), (4 * 32, 16))
    )
    experts, scales = route(x[:, :4], 3, norm=True)
    weights = ExpertWeights(gate_up / 32**0.5, down / 16**0.5)
    rounded = gated_experts(x, weights, experts, scales, SMALL_TILES)
    assert rounded.dtype == torch.float16
    wanted = expected(x, weights, experts, scales)
    error = (rounded.double().sum(0).cpu() - wanted).norm() / wanted.norm()
    assert error < 2 * torch.finfo(torch.float16).eps


def test_choices_are_experts_whatever_the_scores_are() -> None:
    """k of them, each once: also where scores are infinite or no numbers."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 5, [-inf] * 5, [1.0, nan, -inf, 2.0, inf], [-inf, 3.0, -inf, nan, -inf]]
    experts, _ = route(torch.tensor(rows, device=DEVICE), 3, norm=True)
    chosen = experts.tolist()
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in chosen)
    assert chosen[2][:2] == [4, 3] and chosen[3][0] == 1


def test_equal_scores_take_the_first_expert() -> None:
    experts, scales = route(torch.zeros(2, 6, device=DEVICE), 2, norm=True)
    assert experts.tolist() == [[0, 1], [0, 1]]
    assert scales.tolist() == [[0.5, 0.5], [0.5, 0.5]]
