"""Each Triton kernel against plain PyTorch: on the GPU, and through Triton's interpreter."""

import functools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint, rare, small_config, with_rare

pytest.importorskip("triton")

from attention_cases import (
    CASES,
    DEVICE,
    DTYPES,
    HAS_CUDA,
    Case,
    close,
    poisoned_cache,
    put,
    randn,
    run_case,
)
from held_codes import count_rehearsed, record_launches

from nanovllm.attention import select_backend
from nanovllm.attention.base import QKV, AttentionNeeds
from nanovllm.attention.flash_attn_backend import FlashAttentionBackend
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.compiling.mends import hash_callees_first, keep_apart, mend
from nanovllm.distributed.bulk import Gathered
from nanovllm.distributed.group import Group
from nanovllm.kernels import device_features as hopper
from nanovllm.kernels.activation import act_and_mul
from nanovllm.kernels.attention import decode_many as paged_decode
from nanovllm.kernels.attention import prefill as paged_prefill
from nanovllm.kernels.attention.decode_many import decode_tiles
from nanovllm.kernels.attention.gate import gate_heads
from nanovllm.kernels.attention.prefill import attend_to_limits
from nanovllm.kernels.attention.rope import qk_norm_rope_store
from nanovllm.kernels.attention.rotate import rotate_
from nanovllm.kernels.attention.splits import choose_num_splits
from nanovllm.kernels.device_features import can_describe, describe, spare_rows
from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.kernels.products import linear as linear_kernels
from nanovllm.kernels.products import row as row_kernels
from nanovllm.kernels.products.linear import choose_tiles, linear
from nanovllm.kernels.tokens import fill_in
from nanovllm.layers.base import Build
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weights.weight import Gate, PlainWeight
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache, dequantize, quantize, rounded
from nanovllm.tensors.qk_norm_rope import QKNormRope
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.device import fp8_refusal

HALF = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter does not multiply bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 1024), (2, 5, 80)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    wanted = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-6)
    close(rms_norm(x, weight, 1e-6), wanted)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_defect_4_float32_norm_leaves_its_inputs_alone(fused: bool) -> None:
    """`.float()` of float32 is a no-op: an in-place norm would change the residual."""
    norm = RMSNorm(64, 1e-6, Build(torch.float32, fused, Group(), TorchBackend(), 64)).to(DEVICE)
    norm.weight.data.copy_(randn(64, seed=2))
    x, residual = randn(5, 64), randn(5, 64, seed=1)
    copies = x.clone(), residual.clone()
    out, total = norm.add_forward(x, residual)
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])
    close(total, x + residual)
    close(out, norm(total))
    assert torch.equal(total, x + residual), "the sum is what the next layer adds to"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (6, 1000), (4, 2048)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    weight = randn(shape[-1], dtype=dtype, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close(out, torch.nn.functional.rms_norm(total.double(), shape[-1:], weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 200), (3, 3072)])
def test_act_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close(act_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("parts", "rounded"), [(1, False), (2, False), (4, False), (3, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_of_partial_results(parts: int, rounded: bool, dtype: torch.dtype) -> None:
    x, residual = randn(parts, 5, 96), randn(5, 96, dtype=dtype, seed=1)
    x = x.to(dtype) if rounded else x  # as experts give them in large steps
    weight = randn(96, dtype=dtype, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    close(total, x.double().sum(0) + residual)
    close(out, torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), 1e-6))
    assert out.dtype == total.dtype == dtype


PRODUCTS = {  # T, N, K; through which of the paths
    "row": (1, 128, 512),
    "row-odd": (1, 50, 1000),
    "row-rounds": (1, 6, 5000),
    "tiles": (2, 128, 1024),
    "tiles-17": (17, 128, 1024),
    "tiles-wide": (70, 4096, 512),
    "tiles-whole": (130, 4096, 512),
    "tiles-200-spare": (200, 128, 512),
    "library": (3, 50, 96),
}


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("name", with_rare(PRODUCTS, "tiles-wide"))
def test_linear(name: str, partial: bool) -> None:
    """Against float64; rows of x may be a slice of something wider, or have others after them.
    Each path has a bias in some of its cases.
    """
    has_bias = partial == (name in ("row", "tiles-17", "tiles-whole", "library"))
    T, N, K = PRODUCTS[name]
    x = randn(T, K + 8, dtype=HALF)[:, :K]
    weight = randn(N, K, dtype=HALF, seed=1) * K**-0.5
    if name.endswith("-spare"):
        given, x = x, spare_rows(T, K, like=x)
        x.as_strided((256, K), (K, 1)).fill_(torch.nan)
        x.copy_(given)
    bias = randn(N, dtype=HALF, seed=2) if has_bias else None
    out = linear(x, weight, bias, partial)
    tiles = choose_tiles(T, N, K, partial)
    if name.startswith("tiles"):
        assert (tiles is not None) == (partial or (N == 4096 and T <= 128))
    if T > 1 and tiles is not None and tiles.splits > 1 and can_describe(x):
        assert partial and out.shape == (tiles.splits, T, N) and out.dtype == torch.float32
        out = out.sum(0)
    assert out.shape == (T, N)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("N", [128, 1024, 1536, 3072, 4096, 6144, 12288])
def test_tiles_make_about_as_many_programs_as_run_at_once(N: int, partial: bool) -> None:
    taken = False
    for K in (1024, 2048, 4096, 12288):
        for T in (2, 17, 64, 65, 128, 129, 256, 257):
            if (tiles := choose_tiles(T, N, K, partial)) is None:
                continue
            taken = True
            programs = N // 64 * -(-T // tiles.block_t) * tiles.splits
            assert programs <= 128
            assert not partial or tiles.splits == 4 or 2 * programs > 128
            assert tiles.block_t >= T or tiles.block_t == (64 if N <= 1024 else 128)
            assert K % (tiles.splits * tiles.block_k) == 0
            # Elsewhere the library is faster.
            assert T <= 128 or (T <= 256 and partial and N * K <= 2**23)
            if tiles.splits == 1:
                assert programs >= 64 and N * K <= 2**23
            assert tiles.splits == 1 or partial
    # Unsplit, only 4096 and 6144 outputs make 64 to 128 programs of at most 128 rows.
    assert taken == (N in (4096, 6144) or (partial and N < 12288))
    assert not choose_tiles(2, 1000, 2048, partial)
    assert not choose_tiles(2, N, 2000, partial)


def test_a_description_goes_on_into_spare_rows_and_not_beyond_the_storage() -> None:
    x = spare_rows(130, 16, like=randn(1, dtype=HALF))
    assert x.shape == (130, 16) and x.dtype == HALF
    sizes = {n: spare_rows(n, 2, 3, like=x).untyped_storage().nbytes() // 12 for n in (1, 16, 33)}
    assert sizes == {1: 1, 16: 16, 33: 64}
    if not can_describe(x):
        pytest.skip("neither a Hopper GPU nor an interpreter that knows descriptors")
    assert describe(x, 64, 16).shape == [192, 16]
    assert describe(x, 128, 16).shape == [256, 16]
    assert describe(x[66:], 64, 16).shape == [64, 16], "whole tiles already"
    assert describe(x[100:, 8:], 128, 8).shape == [128, 8]
    assert describe(randn(130, 16, dtype=HALF), 64, 16).shape == [130, 16]
    wider = randn(130, 40, dtype=HALF)
    assert describe(wider[:, :16], 64, 16).shape == [130, 16]
    assert describe(wider[:100, 24:], 64, 16).shape == [128, 16]


def test_what_products_read_goes_on_to_the_end_of_a_tile() -> None:
    x, cache = randn(70, 256, dtype=HALF), randn(2, 1, 16, 2, 16, dtype=HALF)
    if not can_describe(x):
        pytest.skip("neither a Hopper GPU nor an interpreter that knows descriptors")
    tables, lens = torch.ones(2, 70, 1, dtype=torch.int32, device=DEVICE)
    attended = paged_decode.paged_decode(
        x.view(70, 16, 16), KVCache(*cache), tables - 1, lens[:, 0], Scoring(1.0)
    ).flatten(1)
    normed, _ = add_rms_norm(x, x, x[0], 1e-6)
    for out in (rms_norm(x, x[0], 1e-6), normed, act_and_mul(x), attended):
        assert describe(out, 64, 16).shape == [128, out.shape[1]]


@pytest.mark.parametrize("T", [3, 70])
def test_projections_to_heads_may_be_partial(T: int, tmp_path: Path) -> None:
    build = Build(HALF, True, Group(), TorchBackend(), 64)
    config = small_config(tmp_path, hidden_size=512, head_dim=16)
    layer = QKVParallelLinear(config, build).to(DEVICE)
    layer.weight.data.copy_(randn(128, 512, seed=1) * 512**-0.5)
    x = randn(T, 512, dtype=HALF)
    out = layer(x)
    assert out.shape == (4, T, 128) if can_describe(x) else (T, 128)
    wanted = x.double() @ layer.weight.data.double().T
    torch.testing.assert_close(out.double().view(-1, T, 128).sum(0), wanted, atol=2e-2, rtol=1e-2)


def test_a_matrix_of_unaligned_rows_is_not_described() -> None:
    x = randn(6, 40, dtype=HALF)
    if not can_describe(x):
        pytest.skip("neither a Hopper GPU nor an interpreter that knows descriptors")
    assert can_describe(x[:, :24])
    assert can_describe(x[:, 8:])
    assert not can_describe(x[:, 1:]), "begins at an odd address"
    assert not can_describe(randn(6, 36, dtype=HALF)), "rows of 72 bytes"
    assert not can_describe(x.T)
    out = linear(x[:, 1:33], randn(64, 32, dtype=HALF, seed=1))
    wanted = x[:, 1:33].double() @ randn(64, 32, dtype=HALF, seed=1).double().T
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)


def holding(numbers: torch.Tensor) -> PlainWeight:
    return PlainWeight(numbers, fused=True)


@pytest.mark.parametrize(
    ("T", "N", "K", "has_bias"),
    [
        (1, 64, 512, False),
        (1, 37, 1000, True),
        (1, 3, 5000, True),
        (2, 2048, 512, True),  # by tiles
        (5, 24, 96, False),
    ],
)
def test_gated_linear(T: int, N: int, K: int, has_bias: bool) -> None:
    x = randn(T, K, dtype=HALF)
    weight = randn(2 * N, K, dtype=HALF, seed=1) * K**-0.5
    product, bias = x.double() @ weight.double().T, None
    if has_bias:
        bias = randn(2 * N, dtype=HALF, seed=2)
        product += bias
    gate, up = product.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    out = holding(weight).multiply(x, bias, gate=Gate())
    room = torch.full((T + 1, N), torch.nan, dtype=HALF, device=DEVICE)
    assert holding(weight).multiply(x, bias, gate=Gate(), out=room[:T]) is not None
    for found in (out, room[:T]):
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.double(), wanted, atol=3e-2, rtol=2e-2)
    assert room[T:].isnan().all()


def test_gates_of_rows_as_they_arrive() -> None:
    class Exchange:
        def arrivals(self, num_rows: int, epoch: int) -> Iterator[slice]:
            yield from (slice(3, num_rows), slice(0, 3))

    with torch.device(DEVICE):
        build = Build(HALF, True, Group(), TorchBackend(), 64)
        layer = MergedColumnParallelLinear(512, {"gate": 64, "up": 64}, False, build)
    rows, matrix = randn(4, 512, dtype=HALF), layer.weight.data
    matrix.copy_(randn(128, 512, dtype=HALF, seed=1) / 512**0.5)
    exchange: Any = Exchange()
    out = layer.gated(Gathered(rows, 1, exchange))
    gate, up = (rows.double() @ matrix.double().T).chunk(2, -1)
    assert isinstance(out, torch.Tensor)
    close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("seed", range(60 if HAS_CUDA else 4))
def test_fused_kernels_over_random_shapes(seed: int) -> None:
    """Odd sizes, and rows that lie apart in something wider."""
    rng = random.Random(seed)
    T, M = rng.choice([1, 2, 5, 16, 63, 130, 255]), rng.choice([24, 96, 500, 512, 1024, 1500])
    T = T if HAS_CUDA else min(T, 63)
    N = rng.choice([1, 40, 64, 192, 256])
    offset = 8 * rng.randrange(3)
    dtype = rng.choice(DTYPES)
    print(f"seed {seed}: T {T} M {M} N {N} offset {offset} {dtype}")
    wide = randn(T, 2 * M + 24, dtype=dtype, seed=seed)
    x, residual = wide[:, offset : offset + M], randn(T, M, dtype=dtype, seed=seed + 1)
    weight = randn(M, dtype=dtype, seed=seed + 2)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(out, torch.nn.functional.rms_norm(total.double(), (M,), weight.double(), 1e-5))
    both = wide[:, offset : offset + 2 * M]
    gate, up = both.double().chunk(2, -1)
    close(act_and_mul(both), torch.nn.functional.silu(gate) * up)
    x, matrix = x.to(HALF), randn(2 * N, M, dtype=HALF, seed=seed + 3) * M**-0.5
    wanted = x.double() @ matrix.double().T
    for partial in (False, True):
        product = linear(x, matrix, None, partial)
        product = product.sum(0) if product.dim() == 3 else product
        torch.testing.assert_close(product.double(), wanted, atol=2e-2, rtol=1e-2)
    gate, up = wanted.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    out = holding(matrix).multiply(x, gate=Gate())
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=2e-2)


def test_float32_products_are_left_to_the_library() -> None:
    x, weight = randn(1, 512), randn(64, 512, seed=1)
    assert torch.equal(linear(x, weight, partial=True), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("T", [1, 5, 2000])
def test_fill_in(T: int) -> None:
    B = min(T, 3)
    ids = torch.arange(T, dtype=torch.int32, device=DEVICE)
    ids[:B:2] = -1
    slots = torch.tensor([4, 9, 2], dtype=torch.int32, device=DEVICE)[:B]
    table = torch.arange(100, 110, dtype=torch.int32, device=DEVICE)
    wanted = list(range(T))
    wanted[:B:2] = [104, 102][: len(wanted[:B:2])]
    assert fill_in(ids, slots, table).tolist() == wanted
    from nanovllm.engine import step_inputs

    assert step_inputs.fill_in(ids.cpu(), slots.cpu(), table.cpu()).tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("T", "W"), [(1, 48), (5, 1100)])
def test_gates_of_heads(T: int, W: int, parts: int, dtype: torch.dtype) -> None:
    """All rows in order, or some; gates lie before queries, so their rows apart."""
    out = randn(T, W, dtype=dtype, seed=1)
    given = randn(parts, T, W + 7, dtype=dtype if parts == 1 else torch.float32)[..., :W]
    rows = torch.tensor([T - 1, 0], dtype=torch.int32, device=DEVICE)
    gate = given.double().sum(0).sigmoid()
    given = given[0] if parts == 1 else given
    close(gate_heads(out, given, None), (out.double() * gate).to(dtype))
    close(gate_heads(out[:1].expand(2, W), given, rows), (out[:1].double() * gate[rows]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("has_norms", "fp8"),
    [(True, False), (False, False), (True, True)],
    ids=["norms", "no norms", "fp8"],
)
@pytest.mark.parametrize(
    ("T", "hq", "hkv", "d"),
    [
        (1, 4, 2, 32),
        (1, 6, 1, 32),  # a program has queries and keys
        *((5, *heads) for heads in ((3, 3, 16), (8, 1, 128))),
        rare(5, 6, 2, 64),
        rare(257, 12, 2, 16),  # many tokens take more heads in a program
    ],
)
@pytest.mark.parametrize(
    ("share", "interleaved"),
    [(1, False), (4, False), rare(1, True), rare(2, True)],
    ids=["whole", "quarter", "interleaved", "interleaved half"],
)
def test_qk_norm_rope_store(
    T: int, hq: int, hkv: int, d: int, has_norms: bool, parts: int, dtype: torch.dtype, fp8: bool,
    share: int, interleaved: bool,
) -> None:  # fmt: skip
    """Against the plain layers. Slot -1 is stored nowhere, and nothing else is written."""
    max_position, N, S = 50, 40, 16
    if parts == 1:
        given = qkv = randn(T, hq + 2 * hkv + 1, d, dtype=dtype)[:, :-1]  # rows may lie apart
    else:
        given = randn(parts, T, hq + 2 * hkv, d)
        qkv = (given[0] + given[1] + given[2]).to(dtype)
    q, k, v = (x.clone() for x in qkv.split([hq, hkv, hkv], dim=1))
    positions = torch.randint(0, max_position, (T,), dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(N * S)[:T].to(DEVICE, torch.int32)
    slots[T // 2 :: 4] = -1
    parameters = RopeParameters(10000.0, d // share, interleaved=interleaved)
    rope = RotaryEmbedding(d, max_position, parameters).to(DEVICE)
    norms = None
    if has_norms:
        build = Build(dtype, False, Group(), TorchBackend(), 64)
        q_norm, k_norm = (RMSNorm(d, 1e-6, build).to(DEVICE) for _ in range(2))
        q_norm.weight.copy_(randn(d, seed=1))
        k_norm.weight.copy_(randn(d, seed=2))
        q, k = q_norm(q), k_norm(k)
        norms = q_norm.weight, k_norm.weight, 1e-6
    q, k = rope(positions, q), rope(positions, k)
    cache = poisoned_cache((N, S, hkv, d), FP8 if fp8 else dtype)
    how = QKNormRope(norms, False, rope.turn, positions, slots)
    qkv = qk_norm_rope_store(given, how, cache, dtype)
    assert (qkv is given) == (parts == 1 and not rope.turn.reorders) and qkv.dtype == dtype
    close(qkv[:, :hq], q)
    if fp8:  # half a step: 4 significant bits, or of the least exponent
        least = k.float().abs().amax(-1, keepdim=True) * 2.0**-17
        error = (qkv[:, hq : hq + hkv].float() - k.float()).abs()
        assert (error <= k.float().abs() / 15 + least).all()
    else:
        close(qkv[:, hq : hq + hkv], k)
    assert torch.equal(qkv[:, hq + hkv :], rounded(v) if fp8 else v)
    stored = slots >= 0
    where = slots[stored].long()
    found: list[torch.Tensor] = [cache.k, cache.v]
    if cache.k_exponents is not None and cache.v_exponents is not None:
        exponents = cache.k_exponents.transpose(1, 2), cache.v_exponents.transpose(1, 2)
        found = [dequantize(*given, dtype) for given in zip(found, exponents, strict=True)]
    for heads, numbers in zip(qkv[:, hq:].split([hkv, hkv], 1), found, strict=True):
        flat = numbers.view(N * S, hkv, d)
        assert torch.equal(flat[where], heads[stored])
        assert int((~flat.isnan()).all(-1).all(-1).sum()) == int(stored.sum())


def test_rotary_embedding_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    D, T = 32, 40
    q, k = randn(1, 4, T, D), randn(1, 2, T, D, seed=1)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, D, 2).double() / D)
    angles = torch.outer(torch.arange(T).double(), inv_freq).to(DEVICE)
    table = torch.cat([angles, angles], -1)[None].float()
    wanted_q, wanted_k = apply_rotary_pos_emb(q, k, table.cos(), table.sin())
    rope = RotaryEmbedding(D, T, RopeParameters(10000.0, D)).to(DEVICE)
    positions = torch.arange(T, dtype=torch.int32, device=DEVICE)
    for x, wanted in ((q, wanted_q), (k, wanted_k)):
        close(rope(positions, x[0].transpose(0, 1)), wanted[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "D"), [(2, 64), (16, 72), (33, 16)])
def test_heads_of_towers_are_rotated_in_place(H: int, D: int, dtype: torch.dtype) -> None:
    """Queries and keys of a projection, and not its values."""
    T = 5
    qkv = randn(T, 3 * H, D, dtype=dtype)
    angles = 7 * randn(T, D // 2, seed=1)
    before, found = qkv.clone(), qkv[:, : 2 * H]
    rotate_(found, torch.cat([angles.cos(), angles.sin()], dim=1))
    x = torch.view_as_complex(torch.stack(before[:, : 2 * H].double().chunk(2, dim=-1), dim=-1))
    wanted = torch.view_as_real(x * torch.exp(1j * angles.double())[:, None])
    close(found, torch.cat(wanted.unbind(-1), dim=-1))
    assert torch.equal(qkv[:, 2 * H :], before[:, 2 * H :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 72])
def test_attention_within_sequences(D: int, dtype: torch.dtype) -> None:
    """Each token sees all of its sequence, or its first ones, where a projection has its heads."""
    lens, H = [5, 130, 64, 33], 2
    qkv = randn(sum(lens), 3 * H, D, dtype=dtype)
    begins = torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)
    limits = torch.tensor(lens).repeat_interleave(torch.tensor(lens))
    limits[-10:] = torch.arange(24, 34)
    found = attend_to_limits(
        *qkv.chunk(3, dim=1), begins, max(lens), limits.to(DEVICE, torch.int32)
    )
    wanted = []
    for x, seen in zip(qkv.double().split(lens), limits.to(DEVICE).split(lens), strict=True):
        q, k, v = (heads.transpose(0, 1) for heads in x.chunk(3, dim=1))  # [H, n, D]
        mask = torch.arange(len(x), device=DEVICE) < seen[:, None]
        found_there = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        wanted.append(found_there.transpose(0, 1))
    close(found, torch.cat(wanted))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kvcache_writes_its_slots_and_nothing_else(dtype: torch.dtype, fp8: bool) -> None:
    N, S, H, D, T = 5, 16, 3, 80, 12
    qkv = randn(T, 4 * H, D, dtype=dtype) * 10.0 ** randn(T, 1, 1)
    qkv[5, H] = 0
    k, v = qkv.to(dtype)[:, H : 2 * H], qkv.to(dtype)[:, 2 * H : 3 * H]  # strided, as in the model
    slots = torch.randperm(N * S)[:T].to(DEVICE, torch.int32)
    slots[3] = slots[7] = -1
    wanted = poisoned_cache((N, S, H, D), FP8 if fp8 else dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            put(wanted, 0, slot // S, slot % S, k[t])
            put(wanted, 1, slot // S, slot % S, v[t])
    for store in (TritonBackend().store_kvcache, TorchBackend().store_kvcache):
        cache = poisoned_cache((N, S, H, D), FP8 if fp8 else dtype)
        store(k, v, cache, slots)
        assert_same_bits(cache, wanted)


def assert_same_bits(cache: KVCache, wanted: KVCache) -> None:
    for ours, theirs in zip(cache, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_fp8_is_the_nearest_number_with_the_least_exponent() -> None:
    """Against all numbers of the format, by its definition, in float64."""
    codes = [(m / 8) * 2.0**-6 for m in range(8)]
    codes += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]  # NaN
    numbers = torch.tensor(sorted({-x for x in codes} | {*codes}), dtype=torch.float64)
    assert numbers.max() == 448
    x = randn(300, 16) * 10.0 ** (4 * randn(300, 1, seed=1))
    x[0], x[1], x[2] = 0, 448, 448.0001
    x[3] = 1e-30
    found, exponents = quantize(x)
    most = x.double().abs().amax(-1).cpu()
    power = 2.0 ** exponents.double().cpu()
    assert exponents[:4].tolist() == [-64, 0, 1, -64]
    assert (most <= 448 * power * (1 + 2.0**-22)).all()
    assert ((most > 224 * power * (1 - 2.0**-22)) | (exponents.cpu() == -64)).all()
    scaled = x.double().cpu() / power[:, None]
    least = (scaled.unsqueeze(-1) - numbers).abs().amin(-1)
    assert torch.equal((scaled - found.double().cpu()).abs(), least)


# In 8 bits, these shapes differ from others by what has nothing to do with how keys are stored.
PLAIN = {"gqa-1", "gqa-3", "gqa-8", "gqa-12", "head-64", "window-1", "window-10", "softcap"}
KINDS = [*((name, False) for name in CASES)]
KINDS += [rare(name, True) if name in PLAIN else (name, True) for name in CASES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fp8"), KINDS)
@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend], ids=["torch", "triton"])
def test_attention(backend: type, name: str, fp8: bool, dtype: torch.dtype) -> None:
    """Defect 10 too: everything outside the sequences is NaN, so one foreign read shows."""
    case = Case(**CASES[name], dtype=dtype, fp8=fp8)  # type: ignore[arg-type]
    out = run_case(backend(), case)
    assert not out.isnan().any()
    close(out, case.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [rare("prefill"), rare("prefill-cached"), "mixed", "window-70", rare("sinks")]
)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_attention_of_a_step_with_room_for_more(name: str, fp8: bool, dtype: torch.dtype) -> None:
    """Three more decodes that see nothing, prompts without tokens and tokens of no prompt change
    nothing, where whatever they could read is NaN.
    """
    case = Case(**CASES[name], dtype=dtype, fp8=fp8)  # type: ignore[arg-type]
    TorchBackend().store_kvcache(case.k, case.v, case.cache, case.context.slot_mapping)
    context, n = case.context, case.context.num_decodes
    T = len(case.q) - n

    def spaced(x: torch.Tensor, behind: int, padding: float) -> torch.Tensor:
        rooms = [x.new_full((count, *x.shape[1:]), padding) for count in (3, behind)]
        return torch.cat([x[:n], rooms[0], x[n:], rooms[1]])

    def ended(ends: torch.Tensor | None) -> torch.Tensor:
        assert ends is not None
        return torch.cat([ends, ends[-1:].repeat(2)])

    padded = replace(
        context,
        num_decodes=n + 3,
        context_lens=spaced(context.context_lens, 2, 0),
        block_tables=spaced(context.block_tables, 2, 0),
        cu_seqlens_q=ended(context.cu_seqlens_q),
        cu_seqlens_k=ended(context.cu_seqlens_k),
        max_seqlen_q=384,
        num_keys=0,
    )
    rows = QKV(*(spaced(x, 384 - T, torch.nan) for x in (case.q, case.k, case.v)))
    out = TritonBackend().attend(rows, case.cache, padded, case.scoring)
    close(torch.cat([out[:n], out[n + 3 : n + 3 + T]]), case.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [{}, {"hkv": 1, "hq": 40}, {"block_size": 256}],
    ids=["head-256", "gqa-40", "one-block-256"],
)
def test_attention_in_tiles_of_smaller_gpus(
    shape: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 8.x and 12.x, also for more heads than a tile has rows."""
    case = Case([1, 1, 9, 40], [30, 5, 41, 40], num_decodes=2, d=256, dtype=dtype, **shape)
    largest = decode_tiles(case.q)
    for module in (hopper, paged_decode, paged_prefill):
        monkeypatch.setattr(module, "has_room", lambda x: False)
    assert decode_tiles(case.q) < largest
    close(run_case(TritonBackend(), case), case.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, rare(1)])
@pytest.mark.parametrize("num_splits", [rare(1), 4, rare(16), rare(32)])
def test_split_decode(num_splits: int, seed: int, dtype: torch.dtype) -> None:
    """Random shapes; one context for which 32 splits are many, and padding rows of length 0."""
    rng = random.Random(seed)
    lens = [rng.randint(1, 60), rng.randint(100, 300), rng.randint(530, 700), rng.randint(1, 300)]
    rng.shuffle(lens)
    hkv, d = rng.choice([1, 2, 3]), rng.choice([32, 64, 128])
    shape: dict[str, Any] = {"hkv": hkv, "hq": hkv * rng.choice([1, 2, 5]), "d": d}
    shape["block_size"] = rng.choice([16, 32, 64, 256])
    shape |= {"window": rng.choice([0, 100]), "sinks": rng.random() < 0.5, "fp8": seed == 0}
    print(f"seed {seed}: {lens}, {shape}")
    case = Case([1] * len(lens), lens, num_decodes=len(lens), dtype=dtype, **shape)
    run_case(TritonBackend(), case)  # stores this step's keys
    context = case.context.context_lens.clone()
    args = (case.q, case.cache, case.context.block_tables, context)
    shared: dict[Any, torch.Tensor] = {}  # by the layers of a step
    decode = functools.partial(
        paged_decode.paged_decode,
        *args,
        case.scoring,
        num_splits=num_splits,
        shared=shared,
    )
    for _ in range(3 if HAS_CUDA else 1):
        close(decode(), case.wanted())
    padding = rng.randrange(len(lens))
    context[padding] = 0
    others = [i for i in range(len(lens)) if i != padding]
    close(decode()[others], case.wanted()[others])
    assert len(shared) == (num_splits > 1)
    for arrived in shared.values():
        assert arrived.shape == (len(lens) * hkv,)
        assert not arrived.any(), "the next layer begins at 0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("d", [80, 128])
def test_decode_in_tiles_of_many_sequences(
    d: int, fp8: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full batches have tiles of their own where keys are in 8 bits, and queries in 16."""
    lens = [1, 31, 32, 33, 100, 150]
    shape: dict[str, Any] = {"d": d, "fp8": fp8, "hkv": 1, "hq": 5, "block_size": 16}
    case = Case([1] * 6, lens, num_decodes=6, dtype=dtype, sinks=True, **shape)
    run_case(TritonBackend(), case)  # stores this step's keys
    args = case.q, case.cache, case.context.block_tables, case.context.context_lens
    asked = []

    def tiles(q: torch.Tensor, fp8: bool, columns: int, many: bool) -> tuple[int, int, int]:
        asked.append(many)
        return decode_tiles(q, fp8, columns, many)

    monkeypatch.setattr(paged_decode, "decode_tiles", tiles)
    for programs in (6, 7):
        monkeypatch.setattr(paged_decode, "MANY_PROGRAMS", programs)
        out = paged_decode.paged_decode(*args, case.scoring, num_splits=1)
        close(out, case.wanted())
    assert asked == [True, False]
    q = case.q.to(torch.float16)
    assert (decode_tiles(q, fp8, many=True) != decode_tiles(q, fp8)) == fp8
    assert decode_tiles(q, fp8, 16)[:2] == decode_tiles(q[..., :64], fp8)[:2] == (64, 2)  # no WGMMA


@pytest.mark.parametrize("seed", range(40 if HAS_CUDA else 3))
def test_attention_over_random_shapes(seed: int) -> None:
    """Any number of heads for a KV head, head size and block size; cached context; decodes."""
    rng = random.Random(seed)
    block_size, d = rng.choice([16, 32, 64, 256]), rng.choice([16, 32, 64, 80, 96, 128, 256])
    hkv, dtype = rng.choice([1, 2, 3]), rng.choice(DTYPES)
    hq = hkv * rng.choice([1, 2, 3, 4, 5, 7, 8, 12])
    num_decodes = rng.randrange(3)
    q_lens = [1] * num_decodes + [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
    k_lens = [n + rng.choice([0, rng.randint(0, 150)]) for n in q_lens]
    print(f"seed {seed}: {hq}/{hkv} heads of {d}, blocks of {block_size}, {q_lens} of {k_lens}")
    shape = {"hq": hq, "hkv": hkv, "d": d, "block_size": block_size, "dtype": dtype}
    scoring = {"window": rng.choice([0, rng.randint(1, 120)]), "softcap": rng.choice([0.0, 2.0])}
    shape |= {**scoring, "sinks": rng.random() < 0.5}
    print(f"{scoring}, sinks: {shape['sinks']}")
    case = Case(q_lens, k_lens, num_decodes=num_decodes, **shape)  # type: ignore[arg-type]
    close(run_case(TritonBackend(), case), case.wanted())


def test_number_of_splits() -> None:
    assert choose_num_splits(256, 8, 128, 4096) == 1
    assert choose_num_splits(96, 8, 128, 4096) == 2
    assert choose_num_splits(64, 8, 128, 4096) == 2
    assert choose_num_splits(64, 8, 64, 4096) == 4
    assert choose_num_splits(12, 8, 128, 4096) == 16
    assert choose_num_splits(1, 8, 128, 4096) == 16
    assert choose_num_splits(1, 8, 128, 16384) == 16
    assert choose_num_splits(1, 8, 128, 32768) == 32
    assert choose_num_splits(1, 8, 128, 100) == 1
    assert choose_num_splits(96, 8, 128, 4096, programs=640) == 1
    assert choose_num_splits(64, 4, 128, 4096, programs=640) == 4


def test_an_unusable_backend_reports_every_refusal() -> None:
    needs = AttentionNeeds(torch.device("cpu"), torch.float32, 24, 16)
    with pytest.raises(ValueError, match=r"triton: head_dim 24 is not.*flash_attn: needs a CUDA"):
        select_backend("flash_attn", needs)
    assert select_backend("auto", needs)[0].name == "torch"


@pytest.mark.parametrize("version", [(7, 0), (7, 5)])
def test_gpu_below_8_0_has_torch(
    version: tuple[int, int],
    set_capability: Callable[[tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A T4 began with Triton, whose tiles do not fit it, and ended as the engine started."""
    needs = AttentionNeeds(torch.device("cuda", 0), torch.float16, 128, 256)
    set_capability(version)
    found = ".".join(map(str, version))
    backend, reason = select_backend("auto", needs)
    assert backend.name == "torch"
    assert f"triton: needs a GPU of compute capability 8.0 or higher, got {found}" in reason
    for choice in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"'{choice}'.*triton: .* 8.0 .*got {found}"):
            select_backend(choice, needs)
    for is_amd in (False, True):  # AMD's versions are not compute capabilities
        monkeypatch.setattr(torch.version, "hip", "6.3" if is_amd else None)
        set_capability(version if is_amd else (8, 0))
        assert select_backend("auto", needs)[0].name == "triton"


def test_who_reads_an_fp8_cache(
    set_capability: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    needs = AttentionNeeds(cuda, torch.bfloat16, 128, 256, fp8=True)
    assert "not support an FP8 KV cache" in str(FlashAttentionBackend.refusal(needs))
    assert "from 32 on" in str(TritonBackend.refusal(replace(needs, head_dim=16)))
    set_capability((8, 6))
    assert "compute capability 8.9 or higher" in str(fp8_refusal(cuda))
    set_capability((8, 9))
    assert fp8_refusal(cuda) is None and fp8_refusal(torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_no_8_bits_hold_does_not_pass_for_right(dtype: torch.dtype) -> None:
    """Vectors with infinity and NaN; and the largest numbers of float16 stay finite."""
    x = torch.ones(6, 1, 32, dtype=dtype, device=DEVICE)
    x[0, 0, 3], x[1, 0, 3], x[2, 0, 3] = torch.inf, -torch.inf, torch.nan
    x[3, 0, 3], x[4, 0, 3] = 65504.0, -64000.0
    slots = torch.arange(6, dtype=torch.int32, device=DEVICE)
    for backend in (TorchBackend(), TritonBackend()):
        cache = poisoned_cache((1, 16, 1, 32), FP8)
        backend.store_kvcache(x, x, cache, slots)
        assert cache.k_exponents is not None
        found = dequantize(cache.k, cache.k_exponents.transpose(1, 2), dtype)[0, :6, 0]
        assert not found[:3, 3].isfinite().any()
        assert found[3:].isfinite().all() and cache.k_exponents.max() <= 127
        assert (found[3:5, 3].abs() > 6e4).all() and (found[5] == 1).all()


@pytest.mark.parametrize("g", [2, 16, 32])
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("hkv", [2, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_decodes_of_every_batch_take_kernels_of_powers_of_two(
    fp8: bool, hkv: int, d: int, g: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are rehearsed, as if they were all that a model may have."""
    launched, splits = list[tuple[int, ...]](), list[int]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            splits.append(grid[2])
            return lambda *args, **how: launched.append(
                tuple(how[key] for key in ("BLOCK_N", "num_warps", "num_stages", "SPLITS_PAD"))
            )

    def decode(B: int) -> tuple[int, ...]:
        lens = torch.zeros(B, dtype=torch.int32, device=DEVICE)
        q = torch.empty(B, g * hkv, d, dtype=HALF, device=DEVICE)
        tables = lens[:, None]  # of one block: the longest sequence decides
        paged_decode.paged_decode(q, cache, tables, lens, scoring, max_context=longest)
        return launched[-1]

    monkeypatch.setattr(paged_decode, "_decode_kernel", Kernel())
    monkeypatch.setattr(paged_decode, "paged_prefix", lambda *args: (None,) * 4)
    scoring, cache = (
        Scoring(1.0),
        KVCache.empty((1, 256, hkv, d), FP8 if fp8 else HALF, torch.device(DEVICE)),
    )
    for longest in (90, 40960, 4096):
        rehearsed = {decode(1 << i) for i in range(11)}
        batches = (1, 12, 40, 64, 80, 96, 160, 192, 240, 320, 512, 768, 1000)
        assert {decode(B) for B in batches} <= rehearsed
        assert len(rehearsed) > 1 or longest < 40960
    if fp8 and d == 128 and paged_decode.MIN_COLUMNS == 8:
        tiles = {2: (128, 4, 3), 16: (64, 2, 5), 32: (128, 4, 5)}[g]
        for B, num_splits in ((768 // hkv, 1 if g == 2 else 2), (512 // hkv, 2)):
            assert (decode(B), splits[-1]) == ((*tiles, 1 if num_splits == 1 else 16), num_splits)


def test_decodes_store_their_own_token_where_a_step_has_one_of_each(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(make_checkpoint(tmp_path / "model"))
    rope = RotaryEmbedding(config.head_dim, 16, config.layers[0].rope)
    one = Build(HALF, True, Group(), TritonBackend(), 64)
    for build, most in ((one, 16), (one._replace(decode_tokens=2), 0)):
        assert Qwen3Attention(config, 0, rope, build).attn.max_fused_decodes == most


def test_products_of_every_number_of_rows_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with weights of several shapes; a single row has the kernel of its shape."""
    kernels = {linear_kernels: "_tiles_kernel", row_kernels: "_row_kernel"}
    launched, counts = record_launches(monkeypatch, kernels), list[int]()
    monkeypatch.setattr(linear_kernels.F, "linear", lambda *args: None)
    for N, K in ((128, 512), (1024, 1024), (4096, 1024), (6144, 4096), (2048, 4096)):
        weight = torch.empty(N, K, dtype=HALF, device=DEVICE)
        for partial in (False, True):

            def multiply(T: int, weight: torch.Tensor = weight, partial: bool = partial) -> None:
                x = torch.empty(T, weight.shape[1], dtype=HALF, device=DEVICE)
                linear(x, weight, None, partial)

            counts.append(count_rehearsed(launched, multiply))
    assert min(counts) == 1 and (max(counts) > 5 or not can_describe(weight))


def test_row_parallel_results_are_partial_where_a_kernel_sums_them() -> None:
    alone, by_nccl, by_kernels = Group(), Group(0, 2), Group(0, 2)
    by_kernels.peers = object()  # type: ignore[assignment]
    for group, partial in ((alone, True), (by_nccl, False), (by_kernels, True)):
        layer = RowParallelLinear(1024, 128, False, Build(HALF, True, group, TorchBackend(), 64))
        assert layer.partial == partial


@pytest.mark.parametrize("times", [1, 2])
def test_threads_that_load_kernels_have_launchers_of_their_own(times: int) -> None:
    """Files of launchers become one module, as CPython does it; kernels are loaded by halves."""
    shared, begun, go_on = ModuleType("launcher"), threading.Event(), threading.Event()

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        begun.set()
        go_on.wait(60)
        return shared

    class Kernel:
        _run: str | None = None
        function: str | None = None
        error: Exception | None = None

        @property
        def run(self) -> str:
            if self._run is None:
                self._run = "launcher"
                begun.set()
                go_on.wait(60)
                if self.error:
                    raise self.error
                self.function = "function"
            return self._run

    def at_once(*calls: Callable[[], object]) -> list[object]:
        """The second is called in the middle of the first, and has to wait for it."""
        begun.clear()
        go_on.clear()
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(calls[0])]
            assert begun.wait(60)
            made.append(pool.submit(calls[1]))
            early = wait(made, 0.1).done
            go_on.set()
        assert not early
        return [call.exception() or call.result() for call in made]

    build = SimpleNamespace(_load_module_from_path=load)
    for _ in range(times):
        keep_apart(build, Kernel)
    modules = at_once(*(lambda p=p: build._load_module_from_path("launcher", p) for p in "ab"))
    assert [module.launch for module in modules] == ["a", "b"]  # type: ignore[attr-defined]
    kernel, failing = Kernel(), Kernel()
    launch = lambda kernel: (kernel.run, kernel.function)  # noqa: E731
    both = at_once(lambda: launch(kernel), lambda: launch(kernel))
    assert both == [("launcher", "function")] * 2
    failing.error = MemoryError()
    assert at_once(lambda: launch(failing), lambda: launch(failing)) == [failing.error] * 2

    class Of34:  # Triton 3.4 has no such property
        pass

    keep_apart(SimpleNamespace(), Of34)
    assert not hasattr(Of34, "run")


def test_triton_is_kept_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime import build
    from triton.runtime.jit import DependenciesFinder

    mended = (
        (build, "_load_module_from_path"),
        (CompiledKernel, "run"),
        (DependenciesFinder, "_update_hash"),
    )
    for owner, name in mended:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr("nanovllm.compiling.mends._mended", threading.Event())
    found = set()
    for _ in range(2):
        mend()
        found.add(tuple(getattr(owner, name) for owner, name in mended))
    [(load, run, update)] = found
    assert "keep_apart" in load.__qualname__ and "hash_callees_first" in update.__qualname__
    kernel = SimpleNamespace(_run="launcher", function=None)
    assert run.fget(kernel) == "launcher" and "_loading" in vars(kernel)


def test_a_callee_is_hashed_before_its_globals_are_taken_over() -> None:
    """Triton up to 3.6 does so: a second start compiled 27 of 50 kernels again."""

    class Function:
        def __init__(self) -> None:
            self.globals: dict[str, int] = {}

        @property
        def cache_key(self) -> str:
            self.globals["SPAN"] = 4096
            return "key"

    class Finder:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def _update_hash(self, callee: Function) -> None:
            self.seen += [dict(callee.globals), callee.cache_key]

    callee, once, again = Function(), Finder(), Finder()
    hash_callees_first(Finder)
    once._update_hash(callee)
    again._update_hash(callee)
    assert once.seen == again.seen == [{"SPAN": 4096}, "key"]
