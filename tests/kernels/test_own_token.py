"""Decodes of tokens as their projection left them, against PyTorch's operators and float64."""

import ctypes
import mmap
import multiprocessing
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, DTYPES, HAS_CUDA, Case, close, randn

from checkpoints import rare

pytest.importorskip("triton")

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.distributed.group import Group
from nanovllm.kernels.attention.decode_few import FEW_PROGRAMS, own_decode, takes_heads
from nanovllm.layers.base import Build
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.tensors.kv_cache import KVCache, dequantize, rounded
from nanovllm.tensors.qk_norm_rope import QKNormRope, Turn
from nanovllm.tensors.scoring import Scoring

LONGEST = 400


class Projected:
    """The last tokens of a case, whose sequences end with other keys and values than they had: what
    PyTorch's operators make of a projection, `given`, some of which are partial results.
    """

    def __init__(self, case: Case, rng: random.Random, has_norms: bool, fp8: bool) -> None:
        B, hq, d = case.q.shape
        hkv, dtype = case.k.shape[1], case.q.dtype
        if rng.random() < 0.5:
            self.given = randn(3, B, hq + 2 * hkv, d, seed=91)
            qkv = (self.given[0] + self.given[1] + self.given[2]).to(dtype)
        else:  # rows may lie apart
            qkv = self.given = randn(B, hq + 2 * hkv + 1, d, dtype=dtype, seed=90)[:, :-1]
        q, k, self.v = qkv.split([hq, hkv, hkv], dim=1)
        norms, plus_one = None, rng.random() < 0.5
        if has_norms:
            build = Build(dtype, False, Group(), TorchBackend(), 64)
            q_norm, k_norm = (
                RMSNorm(d, 1e-6, build, plus_one=plus_one).to(DEVICE) for _ in range(2)
            )
            q_norm.weight.copy_(randn(d, seed=1))
            k_norm.weight.copy_(randn(d, seed=2))
            q, k = q_norm(q), k_norm(k)
            norms = q_norm.weight, k_norm.weight, 1e-6
        how = rng.choice([{"rotary_dim": d}, {"rotary_dim": d // 4}])
        parameters = RopeParameters(10000.0, **how, interleaved=rng.random() < 0.3)
        rope = RotaryEmbedding(d, LONGEST, parameters).to(DEVICE)
        positions = case.context.context_lens - 1
        case.q, self.k = rope(positions, q), rope(positions, k)
        if fp8:
            self.k, self.v = rounded(self.k), rounded(self.v)
        for i in range(B):
            case.keys[i][-1], case.values[i][-1] = self.k[i], self.v[i]
        slots = case.context.slot_mapping.clone()
        self.how = QKNormRope(norms, plus_one, rope.turn, positions, slots)


def bytes_of(cache: KVCache) -> list[torch.Tensor]:
    return [part.view(torch.uint8).clone() for part in cache if part is not None]


def check_cache(cache: KVCache, before: list[torch.Tensor], tokens: Projected) -> None:
    """Keys and values are in their slots, and nothing else has changed."""
    S, slots = cache.k.shape[1], tokens.how.slot_mapping.long()
    block, row = slots // S, slots % S
    found: list[torch.Tensor] = [cache.k[block, row], cache.v[block, row]]
    if cache.k_exponents is not None and cache.v_exponents is not None:
        exponents = (x.transpose(1, 2)[block, row] for x in (cache.k_exponents, cache.v_exponents))
        pairs = zip(found, exponents, strict=True)
        found = [dequantize(*pair, tokens.k.dtype) for pair in pairs]
        # A rounding of the key before may be another one of its code.
        least = tokens.k.float().abs().amax(-1, keepdim=True) * 2.0**-16
        error = (found[0] - tokens.k).float().abs()
        assert (error <= tokens.k.float().abs() / 7 + least).all()
    else:
        close(found[0], tokens.k)
    assert torch.equal(found[1], tokens.v)
    for i, (now, then) in enumerate(zip(bytes_of(cache), before, strict=True)):
        for stored in (now, then):  # exponents are [N, Hkv, S]
            (stored if i < 2 else stored.transpose(1, 2))[block, row] = 0
        assert torch.equal(now, then)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(60) if HAS_CUDA else [*range(8), *map(rare, range(8, 12))])
def test_a_decode_of_a_projection(seed: int, dtype: torch.dtype) -> None:
    """Two rows of several contexts; with and without norms, windows, caps, sinks, and 8 bits."""
    rng = random.Random(seed)
    d, hkv = rng.choice([32, 64, 128]), rng.choice([1, 2, 3])
    fp8, num_splits = seed % 2 == 0, rng.choice([1, 1, 2, 4, 16])
    lens = [rng.choice([1, 2, rng.randint(3, 300)]), rng.choice([16, 17, 64, 65, 129])]
    shape: dict[str, Any] = {"hq": hkv * rng.choice([1, 2, 4, 5, 12, 17]), "hkv": hkv, "d": d}
    shape |= {"block_size": rng.choice([16, 64]), "window": rng.choice([0, 0, 1, 40]), "fp8": fp8}
    shape |= {"sinks": rng.random() < 0.3, "softcap": rng.choice([0.0, 0.0, 2.0])}
    print(f"seed {seed}: {lens}, {shape}, {num_splits} splits")
    case = Case([1, 1], lens, num_decodes=2, dtype=dtype, **shape)
    tokens, context = Projected(case, rng, seed % 3 > 0, fp8), case.context
    before, shared = bytes_of(case.cache), {}
    args = tokens.given, tokens.how, case.cache, dtype, context.block_tables, context.context_lens
    facts = {"scoring": case.scoring, "num_splits": num_splits, "shared": shared}
    close(own_decode(*args, LONGEST, **facts), case.wanted())
    assert len(shared) == (num_splits > 1)
    assert not any(arrived.any() for arrived in shared.values()), "the next layer begins at 0"
    check_cache(case.cache, before, tokens)

    tokens.how.slot_mapping.fill_(-1)  # padding is not stored, and a length of 0 reads nothing
    context.context_lens[1], context.block_tables[1] = 0, 2**30
    before = bytes_of(case.cache)
    close(own_decode(*args, LONGEST, **facts)[:1], case.wanted()[:1])
    assert all(map(torch.equal, bytes_of(case.cache), before))


CASES = [(2, 256, 16, True), (2, 256, 32, False), (11, 64, 2, True), (11, 16, 4, False)]


@pytest.mark.parametrize(
    ("B", "S", "num_splits", "fp8"),
    [*CASES, *(rare(B, S, n, not fp8) for B, S, n, fp8 in CASES)]
    + [rare(16, 256, 32, fp8) for fp8 in (False, True)],
)
def test_decodes_of_projections_in_16_bits(B: int, S: int, num_splits: int, fp8: bool) -> None:
    """Tiles of 128 and of 64 keys, for few programs and more; several in a split."""
    assert (3 * B > FEW_PROGRAMS) == (B > 2)
    rng, dtype = random.Random(num_splits), torch.bfloat16 if HAS_CUDA else torch.float16
    lens = [390, *(rng.randint(1, 390) for _ in range(B - 1))]
    shape: dict[str, Any] = {"hq": 12, "hkv": 3, "d": 32, "block_size": S, "fp8": fp8}
    case = Case([1] * B, lens, num_decodes=B, dtype=dtype, sinks=S == 16, **shape)
    tokens, before, context = Projected(case, rng, True, fp8), bytes_of(case.cache), case.context
    args = case.cache, dtype, context.block_tables, context.context_lens, LONGEST
    out = own_decode(
        tokens.given, tokens.how, *args, case.scoring, num_splits=num_splits, shared={}
    )
    close(out, case.wanted())
    check_cache(case.cache, before, tokens)


@pytest.mark.skipif(HAS_CUDA or sys.platform != "linux", reason="a table in the memory of Linux")
def test_a_table_is_not_read_behind_its_end() -> None:
    """Memory ends at the table's end: splits without tiles begin after it."""
    page, width = mmap.PAGESIZE, 9
    table = np.frombuffer(mmap.mmap(-1, 2 * page), np.int32, width, page - 4 * width)
    table[:] = range(width)
    behind = ctypes.c_void_p(table.ctypes.data + 4 * width)
    cache = KVCache(torch.randn(width, 64, 1, 32), torch.randn(width, 64, 1, 32))
    lens = torch.tensor([513], dtype=torch.int32)  # 17 tiles
    how = QKNormRope(None, False, Turn(torch.randn(600, 32), 32), lens - 1, lens - 1)
    args = cache, torch.float32, torch.from_numpy(table)[None], lens, 1024, Scoring(0.2)

    def decode() -> None:
        assert ctypes.CDLL(None).mprotect(behind, page, 0) == 0
        assert own_decode(torch.randn(1, 4, 32), how, *args, num_splits=16).isfinite().all()

    process = multiprocessing.get_context("fork").Process(target=decode, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_heads_that_do_not_fill_the_registers() -> None:
    assert [d for d in (16, 32, 64, 80, 96, 128, 256) if takes_heads(d)] == [16, 32, 64, 128]
