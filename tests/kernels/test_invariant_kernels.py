"""Kernels of `batch_invariant`: a row has the same bits among any others, a token whichever step
computes it. Each against float64, too, where no other test has it.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES, DEVICE, DTYPES, Case, close, poisoned_cache, put, randn, run_case

pytest.importorskip("triton")

from fp8_checkpoints import in_int8
from invariance import Workload, differences
from test_other_gpus import run

from checkpoints import SMALL, make_checkpoint, rare, with_rare
from nanovllm.attention.invariant_backend import InvariantBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import WHILE_LOADING
from nanovllm.distributed.group import Group
from nanovllm.kernels.activation import quantized_act_and_mul
from nanovllm.kernels.attention.aligned import aligned_attention
from nanovllm.kernels.attention.rope import qk_norm_rope_store
from nanovllm.kernels.experts.gated_experts import experts_by_fixed_tiles, gated_experts
from nanovllm.kernels.experts.routing import route
from nanovllm.kernels.experts.weights import ExpertWeights
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.norm import add_rms_norm
from nanovllm.kernels.products import fp8_half, fp8_linear, int4_linear, int8_linear, linear
from nanovllm.kernels.products.linear import fixed_order_tiles, in_fixed_order
from nanovllm.kernels.recurrent import delta_tokens, short_conv
from nanovllm.kernels.recurrent.delta_prompt import chunks_of
from nanovllm.kernels.sampling import logprobs as logprobs_kernels
from nanovllm.kernels.sampling.logprobs import logprobs
from nanovllm.layers.base import Build
from nanovllm.layers.weights.quantized import QuantizedWeight, dequantize
from nanovllm.models import model_class
from nanovllm.sampling.logprobs import Distributions, Logprobs
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.startup import build as choices
from nanovllm.startup import builder
from nanovllm.tensors.delta_net import DeltaNet, DeltaState
from nanovllm.tensors.fp8 import FP8, LARGEST, Codes
from nanovllm.tensors.int4 import OFFSETS, Int4Codes, pack, plane_size
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.mxfp4 import Mxfp4Codes, packed, packed_exponents
from nanovllm.tensors.mxfp4 import quantize as to_mxfp4
from nanovllm.tensors.qk_norm_rope import QKNormRope, Turn
from nanovllm.tensors.scoring import Scoring

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # as the interpreter, whose is exact
COUNTS = (1, 17, 65) if DEVICE == "cuda" else (1, 17)  # 65 have the interpreter's tiles of T
T = 70


def assert_alike(compute: Callable[..., Any], *inputs: torch.Tensor, dim: int = 0) -> None:
    """Rows have the same bits in any number, and at any place. `dim`: that of rows in results."""
    whole, generator = _parts(compute(*inputs)), torch.Generator().manual_seed(5)
    for count in COUNTS:
        rows = torch.randperm(T, generator=generator)[:count].to(DEVICE)
        for part, of_whole in zip(_parts(compute(*(x[rows] for x in inputs))), whole, strict=True):
            assert part.isfinite().all() and part.equal(of_whole.index_select(dim, rows)), count


def _parts(result: Any) -> list[torch.Tensor]:
    if isinstance(result, Codes):
        return [result.codes.float(), result.scales]
    return (
        [each for part in result for each in _parts(part)]
        if isinstance(result, tuple)
        else [result]
    )


def variants_of(module: Any, name: str, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The constants of each launch of a module's kernel from now on."""
    variants: list[dict[str, Any]] = []
    kernel = getattr(module, name)

    class Spy:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **constants: Any) -> Any:
                variants.append(constants)
                return kernel[grid](*args, **constants)

            return launch

    patch.setattr(module, name, Spy())
    return variants


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=HALF, seed=seed)


def fp8_weight(N: int, K: int, in_blocks: bool) -> Codes:
    codes = (half(N, K, seed=1) * 100).clamp(-LARGEST, LARGEST).to(FP8)
    counts = (-(-N // 128), -(-K // 128)) if in_blocks else (N, 1)
    scales = torch.exp(randn(*counts, seed=2)) / (100 * K**0.5)
    return Codes(codes, scales, (128, 128) if in_blocks else (1, K))


def int8_weight(N: int, K: int) -> Codes:
    codes = torch.randint(-127, 128, (N, K), generator=torch.Generator().manual_seed(1))
    return Codes(codes.to(DEVICE, torch.int8), torch.exp(randn(N, 1, seed=2)) / K, (1, K))


def int4_weight(N: int, K: int, group: int) -> Int4Codes:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (K // group, N), generator=generator)
    scales = torch.exp(torch.randn(K // group, N, generator=generator)) / K**0.5
    both = torch.stack([-(zeros + OFFSETS[HALF]).to(HALF), scales.to(HALF)], 2).contiguous()
    return Int4Codes(pack(codes, plane_size(K, group)).to(DEVICE), both.to(DEVICE), group)


def mxfp4_weight(N: int, K: int) -> Mxfp4Codes:
    codes, exponents = to_mxfp4(randn(N, K, seed=1).cpu() / K**0.5)
    return Mxfp4Codes(packed(codes).to(DEVICE), packed_exponents(exponents).to(DEVICE), K)


@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("N", "K", "has_bias"), [(70, 136, True), (128, 512, False), rare(2112, 256, True)]
)
def test_products(N: int, K: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(T, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1) / K**0.5
    bias = randn(N, dtype=dtype, seed=2) if has_bias else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    close(in_fixed_order(x, weight, bias), wanted.to(dtype))
    into = torch.full((T, N), torch.nan, dtype=dtype, device=DEVICE)
    assert in_fixed_order(x, weight, bias, into) is into and into.equal(
        in_fixed_order(x, weight, bias)
    )
    assert_alike(lambda x: in_fixed_order(x, weight, bias), x)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(1024, 3072), (6144, 1000), (40000, 256)])
def test_products_of_thousands_of_rows(N: int, K: int) -> None:
    """Several tiles, of which each row has the same bits; on Hopper all that there are."""
    x, weight = half(5000, K), half(N, K, seed=1) / K**0.5
    whole, used = in_fixed_order(x, weight), {fixed_order_tiles(weight, len(x))}
    for count in (1, 20, 60, 100, 200, 256, 700):
        used.add(fixed_order_tiles(weight, count))
        assert in_fixed_order(x[7 : 7 + count], weight).equal(whole[7 : 7 + count]), count
    assert len(used) > 3 or torch.cuda.get_device_capability()[0] != 9
    close(whole[:300], (x[:300].double() @ weight.double().T).to(HALF))


PRODUCTS_OF_CODES: dict[str, tuple[Any, Any]] = {
    "fp8 rows": (fp8_linear, lambda: fp8_weight(192, 256, False)),
    "fp8 blocks": (fp8_linear, lambda: fp8_weight(192, 256, True)),
    "fp8 by 16 bits": (fp8_half, lambda: fp8_weight(70, 136, False)),
    "int8": (int8_linear, lambda: int8_weight(70, 144)),
    "int4": (int4_linear, lambda: int4_weight(128, 512, 128)),
    "int4, planes of 16": (int4_linear, lambda: int4_weight(64, 320, 64)),
}


@pytest.mark.parametrize("name", PRODUCTS_OF_CODES)
def test_products_by_codes(name: str) -> None:
    """With a tile for all rows, of which a single one is quantised as many are."""
    kernels, make = PRODUCTS_OF_CODES[name]
    weight = make()
    x, bias = half(T, weight.numbers().shape[1]), half(len(weight), seed=3)
    assert kernels.can_fix_order(weight)
    out = kernels.in_fixed_order(x, weight, HALF, bias)
    wanted = x.double() @ weight.numbers().double().T + bias.double()
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error < 0.05, "that of activations in 8 bits at most"
    assert_alike(lambda x: kernels.in_fixed_order(x, weight, HALF, bias), x)
    if kernels is fp8_linear:
        codes = quantize(x, fp8_linear.act_block_of(weight))
        assert kernels.in_fixed_order(codes, weight, HALF, bias).equal(out)


@pytest.mark.parametrize("way", ["16 bits", "int4"])
def test_rows_anywhere_in_memory_have_one_kernel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that begin at no multiple of 16 bytes, and a single one, which PyTorch calls
    contiguous whatever its stride is.
    """
    if way == "int4":
        variants = variants_of(int4_linear, "_int4_tiles_kernel", monkeypatch)
        codes = int4_weight(128, 512, 128)
        K, product = 512, partial(int4_linear.in_fixed_order, weight=codes, dtype=HALF)
    else:
        variants = variants_of(linear, "_fixed_order_kernel", monkeypatch)
        K, product = 136, partial(in_fixed_order, weight=half(70, 136, seed=1) / 12)
    wide, rows = half(3, K + 5), half(3, K)
    for count in (1, 3):
        wanted = product(rows[:count])
        for begin in (0, 3, 5):
            wide[:, begin : begin + K] = rows
            assert product(wide[:count, begin : begin + K]).equal(wanted), (count, begin)
    assert len(variants) == 8 and all(each == variants[0] for each in variants)
    assert variants[0]["TMA"] or DEVICE == "cuda", "the other kernel is chosen nowhere"


def test_head_in_int8() -> None:
    weight = int8_weight(70, 144)

    def head(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(weight), dtype=HALF, device=DEVICE)
        int8_linear.linear_into(out, x, weight, int8_linear.ONE_TILE)
        return out

    assert_alike(head, half(T, 144))


@pytest.mark.parametrize("act_block", [None, 0, 128])
@pytest.mark.parametrize("parts", [0, 8])
def test_norms(parts: int, act_block: int | None) -> None:
    """Rows of 4,096 values, whose partial results a GPU adds by more warps where they are few."""
    M = 4096 if DEVICE == "cuda" else 264
    x, residual, weight = half(T, M), half(T, M, seed=1), half(M, seed=2)
    if parts:
        x = randn(T, parts, M)

    def norm(x: torch.Tensor, residual: torch.Tensor) -> Any:
        x = x.transpose(0, 1).contiguous() if parts else x
        return add_rms_norm(x, residual, weight, 1e-6, act_block=act_block, fixed_order=True)

    assert_alike(norm, x, residual)
    one, _ = norm(x[:1], residual[:1])
    assert isinstance(one, Codes) == (act_block is not None)


def test_gates_in_8_bits() -> None:
    for act_block in (0, 128):
        assert_alike(lambda x, n=act_block: quantized_act_and_mul(x, False, n), half(T, 2 * 300))


@pytest.mark.parametrize("count", [260])
def test_rotated_heads(count: int) -> None:
    """Many tokens take more heads at a time, unless they are to be computed as few are."""
    D, H, HKV = 32, 16, 4
    x, positions = half(count, H, D), torch.arange(count, dtype=torch.int32, device=DEVICE)
    turn = Turn(randn(count, D, seed=3), D)
    norms = half(D, seed=1), half(D, seed=2), 1e-6

    def rotated(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = KVCache.empty((20, 16, HKV, D), HALF, torch.device(DEVICE))
        how = QKNormRope(norms, False, turn, positions[rows], positions[rows])
        out = qk_norm_rope_store(x[rows], how, cache, HALF, fixed_order=True)
        return out, cache.k.flatten(0, 1)[rows]

    whole = rotated(torch.arange(count, device=DEVICE))
    for rows in (torch.arange(3, 20, device=DEVICE), torch.tensor([259, 7], device=DEVICE)):
        for part, of_whole in zip(rotated(rows), whole, strict=True):
            assert part.equal(of_whole[rows])


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention_agrees_with_the_oracle(name: str, dtype: torch.dtype, fp8: bool) -> None:
    case = Case(**CASES[name], dtype=dtype, fp8=fp8)  # type: ignore[arg-type]
    close(run_case(InvariantBackend(), case), case.wanted().to(dtype))


LENGTH = 150
# Ends within tiles of queries and of keys, and at them; single tokens, as of decodes.
CHUNKS = [(0, 7, 40, 41, 64, 128, 150), (0, 1, 2, 3, 63, 65, 149, 150)]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 128": {"d": 128, "hq": 2, "hkv": 1},
    "groups of 3": {"hq": 6},
    "groups of 12": {"hq": 12, "hkv": 1},
    "window of 10": {"window": 10},
    "window of 70": {"window": 70, "block_size": 64},
    "softcap and sinks": {"softcap": 1.5, "sinks": True, "window": 50},
    "large blocks": {"block_size": 256},
    "8 bits": {"fp8": True},
    "8 bits, window": {"fp8": True, "window": 33},
}


USUAL = {"plain", "heads of 128", "window of 70", "softcap and sinks", "8 bits, window"}


class Sequence:
    """A sequence of LENGTH tokens, of which any chunk may be attended from, alone or not."""

    def __init__(
        self,
        hq: int = 4,
        hkv: int = 2,
        d: int = 32,
        block_size: int = 16,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        fp8: bool = False,
    ) -> None:
        self.q = randn(LENGTH, hq, d, dtype=DTYPES[-1], seed=1)
        self.k, self.v = (randn(LENGTH, hkv, d, dtype=DTYPES[-1], seed=seed) for seed in (2, 3))
        own = randn(hq, dtype=DTYPES[-1], seed=4) if sinks else None
        self.scoring = Scoring(1.2 * d**-0.5, window, softcap, own)
        self.block_size, self.dtype = block_size, FP8 if fp8 else DTYPES[-1]
        blocks = -(-LENGTH // block_size)
        self.tables = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(6))
        self.tables = self.tables.view(2, blocks).to(DEVICE, torch.int32)

    def attend(self, start: int, end: int, beside: int | None = None) -> torch.Tensor:
        """The results of a chunk, of a decode if it has one token; beside the first `beside` tokens
        of the same, in other blocks. What no token of the step may see is NaN.
        """
        size, window = self.block_size, self.scoring.window
        shape = 2 * self.tables.shape[1], size, *self.k.shape[1:]
        cache = poisoned_cache(shape, self.dtype)
        oldest = max(0, start - window + 1) // size * size if window else 0
        spans = [(0, oldest, end)] + ([] if beside is None else [(1, 0, beside)])
        for row, first, last in spans:
            for p in range(first, last):
                block = int(self.tables[row, p // size])
                put(cache, 0, block, p % size, self.k[p])
                put(cache, 1, block, p % size, self.v[p])
        items = [(0, start, end)] if beside is None else [(1, 0, beside), (0, start, end)]
        counts = [last - first for _, first, last in items]
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=DEVICE)
            for each in (counts, [last for *_, last in items])
        )
        q = torch.cat([self.q[first:last] for _, first, last in items])
        tables = self.tables[[row for row, *_ in items]]
        out = aligned_attention(q, cache, tables, cu_q, cu_k, max(counts), self.scoring)
        assert out.isfinite().all()
        return out[len(out) - (end - start) :]


@pytest.mark.parametrize("name", with_rare(SHAPES, *(SHAPES.keys() - USUAL)))
def test_attention_of_a_token_is_that_of_a_prompt(name: str) -> None:
    """Whether its keys come from the same step or an earlier one, and whatever is beside it."""
    seq = Sequence(**SHAPES[name])
    whole = seq.attend(0, LENGTH)
    assert seq.attend(0, LENGTH, beside=37).equal(whole)
    for bounds in CHUNKS:
        parts = [seq.attend(*each, beside=each[0] % 50 or None) for each in pairwise(bounds)]
        assert torch.cat(parts).equal(whole), bounds
    for position, beside in ((0, 40), (31, None), (32, 17), (63, 40), (64, None), (149, 40)):
        assert seq.attend(position, position + 1, beside).equal(whole[position : position + 1])


def test_other_kernels_of_attention_have_other_bits() -> None:
    """So that the test above can fail: those for prompts and for decodes, over the same keys."""
    prompt, decode = Case(q_lens=[150], k_lens=[150]), Case([1], [150], num_decodes=1)
    decode.q = prompt.q[-1:]
    of_prompt, of_decode = (run_case(TritonBackend(), case) for case in (prompt, decode))
    close(of_decode, of_prompt[-1:])
    assert not of_decode.equal(of_prompt[-1:])


# -- experts, states, log-probabilities -----------------------------------------------------------

E, M, I = 5, 128, 128
EXPERTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (half(E * 2 * I, M, seed=1) / M**0.5, half(E * M, I, seed=2) / I**0.5),
    "fp8 rows": lambda: (fp8_weight(E * 2 * I, M, False), fp8_weight(E * M, I, False)),
    "fp8 blocks": lambda: (fp8_weight(E * 2 * I, M, True), fp8_weight(E * M, I, True)),
    "int4": lambda: (int4_weight(E * 2 * I, M, 32), int4_weight(E * M, I, 32)),
    "mxfp4": lambda: (mxfp4_weight(E * 2 * I, M), mxfp4_weight(E * M, I)),
}


@pytest.mark.parametrize("name", with_rare(EXPERTS, "fp8 rows"))
def test_experts(name: str) -> None:
    """A token's results do not depend on how many others its experts have, or on its number."""
    weights, x, logits = ExpertWeights(*EXPERTS[name]()), half(T, M), half(T, E)
    logits[:, 0] += 4

    def compute(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return experts_by_fixed_tiles(x, weights, *route(logits, 2, True))

    out, wanted = compute(x, logits), gated_experts(x, weights, *route(logits, 2, True))
    assert out.dtype == torch.float32 and (out - wanted).norm() < 0.01 * wanted.norm()
    assert_alike(compute, x, logits, dim=1)


def test_experts_keep_codes_that_have_no_tile_elsewhere(tmp_path: Path) -> None:
    """The tiles of experts fit any size, unlike the one tile of a linear layer."""
    shape = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", hidden_size=80, **shape)
    config = ModelConfig.from_pretrained(str(path))
    build = Build(HALF, True, Group(), TritonBackend(), 64, quantization=WHILE_LOADING)
    model = model_class(config.architecture)(config, build._replace(batch_invariant=True))
    layer = model.model.layers[0]
    assert not layer.self_attn.qkv_proj.weight.has_kernels
    assert layer.mlp.experts.gate_up.has_kernels and layer.mlp.experts.down.has_kernels
    dequantize(model)
    assert layer.self_attn.qkv_proj.weight.fixed_order
    assert isinstance(layer.mlp.experts.down, QuantizedWeight)


@pytest.mark.parametrize("dtype", [rare(torch.float32), HALF])
def test_gated_delta_net(dtype: torch.dtype) -> None:
    """Tokens in chunks of any lengths, and one by one; states have the same bits, too."""
    Hk, Hv, K, V, J, length = 2, 4, 16, 32, 4, 12
    C = 2 * Hk * K + Hv * V
    layer = DeltaNet(
        randn(C, J, dtype=dtype, seed=1), randn(Hv, seed=2), randn(Hv, seed=3), randn(V, seed=4),
        1e-6, Hk,
    )  # fmt: skip
    mixed, ba = randn(length, C + Hv * V, dtype=dtype, seed=5), randn(length, 2 * Hv, seed=6)

    def results(bounds: tuple[int, ...], beside: int) -> list[torch.Tensor]:
        tail = torch.full((3, J - 1, C), torch.nan, dtype=dtype, device=DEVICE)
        state = DeltaState(tail, torch.full((3, Hv, V, K), torch.nan, device=DEVICE))
        parts = []
        for start, end in pairwise(bounds):
            counts, lens = [beside, end - start, 1], [beside, end, 0]  # the last is padding
            slots, cu_q, cu_k = (
                torch.tensor(each, dtype=torch.int32, device=DEVICE)
                for each in ([2, 1, 0], [0, *accumulate(counts)], [0, *accumulate(lens)])
            )
            rows = [*range(beside), *range(start, end), 0]
            args = mixed[rows], ba[rows].to(dtype), layer, state, slots, cu_q, cu_k
            out = delta_tokens.tokens(*args)
            assert not out[-1].any()
            parts.append(out[beside:-1])
        return [torch.cat(parts), tail[1], state.memory[1]]

    whole = results((0, length), 0)
    assert all(part.isfinite().all() for part in whole)
    for bounds in ((0, 1, 2, 9, length), (0, 3, length), tuple(range(length + 1))):
        found = results(bounds, 2)
        assert all(a.equal(b) for a, b in zip(found, whole, strict=True)), bounds


def test_short_convolutions() -> None:
    """Decodes are prompts of one token."""
    width, J, length = 48, 3, 40
    bcx, weight, bias = half(length, 3 * width), half(width, J, seed=1), half(width, seed=2)

    def results(bounds: tuple[int, ...]) -> list[torch.Tensor]:
        tail = torch.full((3, J - 1, width), torch.nan, dtype=HALF, device=DEVICE)
        parts = []
        for start, end in pairwise(bounds):
            slots = torch.tensor([1], dtype=torch.int32, device=DEVICE)
            cu_q, cu_k = torch.tensor([[0, end - start], [0, end]], dtype=torch.int32).to(DEVICE)
            chunks = chunks_of(cu_q, end - start)
            args = bcx[start:end], weight, bias, tail, slots, cu_q, cu_k, chunks
            parts.append(short_conv.prompts(*args))
        return [torch.cat(parts), tail[1]]

    whole = results((0, length))
    for bounds in ((0, 1, 2, 17, length), tuple(range(length + 1))):
        assert all(a.equal(b) for a, b in zip(results(bounds), whole, strict=True)), bounds


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_log_probabilities(dtype: torch.dtype) -> None:
    """Of each distribution, and however many of the likeliest are found."""
    logits, drawn = randn(T, 5000, dtype=dtype), torch.arange(T, dtype=torch.int32, device=DEVICE)
    divisors, least = torch.exp(randn(T, seed=1)), randn(T, seed=2) - 1

    def compute(
        x: torch.Tensor, tokens: torch.Tensor, divisors: torch.Tensor, least: torch.Tensor, N: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        m = len(tokens)
        rows = torch.arange(m, dtype=torch.int32, device=DEVICE)
        found = Logprobs.empty(m, N, 0, tokens.device)
        logprobs(x, tokens, rows, divisors, least, found.token_ids, found.values, found.ranks)
        return found.token_ids, found.values

    inputs = logits, drawn, divisors, least
    assert_alike(partial(compute, N=2), *inputs)
    inputs = tuple(x[:9] for x in inputs)
    whole = compute(*inputs, N=MAX_LOGPROBS)
    for N in (0, 1, 7):
        for part, of_whole in zip(compute(*inputs, N=N), whole, strict=True):
            assert part.equal(of_whole[:, : 1 + N])


@pytest.mark.skipif(DEVICE == "cuda", reason="what runs there is what counts")
def test_one_variant_finds_any_number_of_likely_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another variant might add in another order."""
    variants = variants_of(logprobs_kernels, "_logprobs_kernel", monkeypatch)
    logits, drawn = half(3, 5000), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for N in (0, 1, 5, MAX_LOGPROBS):
        found = Logprobs.empty(3, N, 0, drawn.device)
        own = Distributions.of_model(3, drawn.device)
        logprobs(logits, drawn, *own, found.token_ids, found.values, found.ranks)
    assert len(variants) == 4 and all(each == variants[0] for each in variants)


# -- whole models ---------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 1}, {}),
    "qwen3 in fp8": (
        "qwen3",
        {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "gemma 2": ("gemma2", {"sliding_window": 20, "head_dim": 32}, {}),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": 20,
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        {},
    ),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32},
        {},
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        },
        {},
    ),
    "lfm2": (
        "lfm2",
        {"conv_L_cache": 3, "block_multiple_of": 32, "layer_types": ["conv", "full_attention"]},
        {},
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "hits": {"max_num_batched_tokens": 45},
}


@pytest.mark.skipif(DEVICE == "cuda", reason="in tests/gpu, with larger models")
@pytest.mark.parametrize("name", ["qwen3", *(rare(name) for name in FAMILIES if name != "qwen3")])
def test_models_by_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a model's kernels in Triton's interpreter, which CPUs do not choose by themselves."""
    family, shape, more = FAMILIES[name]
    path = make_checkpoint(tmp_path / "model", family, initializer_range=0.1, **shape)
    monkeypatch.setattr(choices, "Build", lambda **how: Build(**{**how, "fused": True}))
    monkeypatch.setattr(builder, "can_use_onednn", lambda *_: False)
    options = {**SMALL, "attention_backend": "triton", "dtype": "float16", **more}
    # Layers with a state begin at a snapshot after 64 tokens.
    has_states = name in ("qwen3.5", "lfm2")
    lengths, shared = ((15, 13), 64) if has_states else ((4, 13), 17)
    work = Workload(9, lengths, max_tokens=4, shared=shared)
    names = ("batch", "chunks", "hits") if has_states else ("batch", "chunks")
    ways = {way: WAYS[way] for way in names}  # test_invariance.py has all, of all families
    assert differences(path, work, {**options, "batch_invariant": True}, ways) == []


# -- the choice of kernels ------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
ENGINES: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "two ranks": {"tensor_parallel_size": 2},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "fp8 experts": {"architecture": "Qwen3MoeForCausalLM", "quantization": "fp8"},
    "mxfp4 experts": {
        "architecture": "GptOssForCausalLM",
        "config": {"quantization_config": {"quant_method": "mxfp4"}},
    },
    "int4": {"config": {"quantization_config": AWQ}},
    "int8": {"config": {"quantization_config": in_int8("channel")}},
    "delta net": {
        "architecture": "Qwen3_5ForCausalLM",
        "config": {"layer_types": ["linear_attention", "full_attention"]},
    },
    "short convolutions": {
        "architecture": "Lfm2ForCausalLM",
        "config": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    },
}
# Kernels that have variants for numbers of rows: one sorts integers, the other multiplies single
# numbers, of some rows or of all.
# Tiles of the last two follow the rows on Hopper, with equal bits, as tests on a GPU see.
HARMLESS = {"_sort_kernel", "_gate_heads_kernel", "_aligned_kernel", "_fixed_order_kernel"}


@pytest.mark.slow
def test_norms_that_are_divided_over_gpus_are_refused(tmp_path: Path) -> None:
    job = {"kind": "engine", "shape": "0.6B", "head_dim": 128, "dtype": "bfloat16"}
    job |= {"architecture": "Olmo2ForCausalLM", "batch_invariant": True, "tensor_parallel_size": 2}
    with pytest.raises(AssertionError, match="norms over the heads of several GPUs"):
        run("9.0", [job], tmp_path)


@pytest.mark.parametrize("name", [rare(name) for name in ENGINES])
def test_one_row_and_many_take_the_same_kernels(name: str, tmp_path: Path) -> None:
    """An engine on an absent H100 whose steps have one token, and one with thousands: all kernels
    of the second, with all constants, are those of the first. No library multiplies anything.
    """
    job = {"kind": "variants", "shape": "0.6B", "architecture": "Qwen3ForCausalLM"}
    job |= {"batch_invariant": True, "max_model_len": 1024, "dtype": "bfloat16", **ENGINES[name]}
    sizes = ((1, 1), (64, 4096))
    jobs = [job | {"max_num_seqs": B, "max_num_batched_tokens": rows} for B, rows in sizes]
    one, many = ({*map(tuple, found)} for found in run("9.0", jobs, tmp_path))
    assert len(one) > 20
    assert {name for name, _ in one ^ many} <= HARMLESS
