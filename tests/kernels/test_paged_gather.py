"""Long prompts over an FP8 cache: their context is gathered first, in the model's dtype."""

import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from attention_cases import DEVICE, DTYPES, HAS_CUDA, Case, close, run_case

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention import prefill as paged_prefill
from nanovllm.kernels.attention.gather import gather_keys
from nanovllm.kernels.attention.prefill import heads_at_once
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring

HEADS = 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [[70], [5, 0, 33, 1, 64], [0, 0, 9, 0]], ids=str)
def test_gathered_keys_are_those_of_the_cache(lens: list[int], dtype: torch.dtype) -> None:
    """Bit by bit, of some heads and of all, of sequences without tokens too."""
    case = Case(lens, lens, hkv=HEADS, d=96, dtype=dtype, fp8=True)
    context = case.context
    TorchBackend().store_kvcache(case.k, case.v, case.cache, context.slot_mapping)
    assert context.cu_seqlens_k is not None
    where = context.block_tables, context.cu_seqlens_k, sum(lens)
    for heads in (slice(0, HEADS), slice(1, 3), slice(3, 4)):
        keys = gather_keys(case.cache, *where, heads, dtype)
        assert torch.equal(keys.k, case.k[:, heads]) and torch.equal(keys.v, case.v[:, heads])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [5, 3, 2, 1, 0])
@pytest.mark.parametrize("how", [{"window": 20, "sinks": True}, {"softcap": 5.0}], ids=str)
def test_long_prompts(
    at_once: int, dtype: torch.dtype, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once, some of them, one, and none where there is no room for one."""
    case = Case([33, 1, 40], [60, 20, 40], hq=10, hkv=HEADS, dtype=dtype, fp8=True, **how)
    monkeypatch.setattr(paged_prefill, "FEW_QUERIES", 8)
    monkeypatch.setattr(paged_prefill, "FEW_SCORES", 0)
    a_head = 2 * 120 * 32 * dtype.itemsize
    monkeypatch.setattr(paged_prefill, "MAX_GATHERED", at_once * a_head + a_head - 1)
    taken, alive = list[slice](), list[Any]()

    def gather(*args: Any) -> Any:
        assert all(keys() is None for keys in alive), "one part at a time"
        taken.append(args[4])
        gathered = gather_keys(*args)
        alive.extend(weakref.ref(x) for x in gathered[:2])
        return gathered

    monkeypatch.setattr(paged_prefill, "gather_keys", gather)
    close(run_case(TritonBackend(), case), case.wanted())
    parts = {5: [5], 3: [3, 2], 2: [2, 2, 1], 1: [1] * 5, 0: []}[at_once]
    assert [heads.stop - heads.start for heads in taken] == parts
    assert sorted(i for heads in taken for i in range(heads.start, heads.stop)) == [
        *range(sum(parts))
    ]


def test_what_is_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries or scores, a step without cached tokens, a cache of 16 bits, a window, and what a
    CUDA graph is to serve.
    """
    monkeypatch.setattr(paged_prefill, "FEW_QUERIES", 16)
    monkeypatch.setattr(paged_prefill, "FEW_SCORES", 17 * 34)
    monkeypatch.setattr(paged_prefill, "gather_keys", None)
    for q_lens, k_lens, fp8, window in (
        ([16], [50], True, 0),
        ([2, 30], [50, 50], True, 0),
        ([17], [34], True, 0),
        ([40], [40], True, 0),
        ([17], [50], False, 0),
        ([17], [50], True, 47),
    ):
        case = Case(q_lens, k_lens, fp8=fp8, window=window)
        close(run_case(TritonBackend(), case), case.wanted())
    for window in (48, 0):
        case = Case([17], [50], fp8=True, window=window)
        with pytest.raises(TypeError):
            run_case(TritonBackend(), case)
    object.__setattr__(case.context, "num_keys", 0)
    close(run_case(TritonBackend(), case), case.wanted())


def test_heads_at_once() -> None:
    """Parts of one size, up to a limit."""
    cache = KVCache.empty((1, 16, 8, 128), FP8, torch.device(DEVICE))
    q = torch.empty(8192, 16, 128, dtype=torch.float16, device=DEVICE)
    wanted = {1: 8, 64: 8, 65: 4, 128: 4, 200: 2, 512: 1, 513: 0}  # of thousands of keys
    assert wanted == {i: heads_at_once(q, cache, 1, i << 10, Scoring(1.0)) for i in wanted}


@pytest.mark.parametrize(("q_len", "k_len"), [(40, 110), (100, 117)])
def test_codes_behind_a_tile_of_queries(q_len: int, k_len: int) -> None:
    """Exponents of a tile of keys that reaches beyond the queries' last key are block 0's, which
    nobody owns here.
    """
    case = Case([q_len], [k_len], fp8=True)
    assert 0 not in case.context.block_tables[0, : -(-k_len // 16)]
    close(run_case(TritonBackend(), case), case.wanted())


@pytest.mark.skipif(HAS_CUDA, reason="what fails leaves no GPU to go on with")
def test_no_entry_of_a_table_behind_a_context_is_read() -> None:
    """They are addresses of nothing: a process that reads there ends."""
    case = Case([70], [75], fp8=True, window=5)
    case.context.block_tables[0, 5:] = 2**30
    close(run_case(TritonBackend(), case), case.wanted())
