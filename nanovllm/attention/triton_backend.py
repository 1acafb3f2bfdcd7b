"""Attention through our own Triton kernels: a GPU path that needs nothing but PyTorch."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import ClassVar

import torch

from nanovllm.attention.base import QKV, AttentionBackend, AttentionNeeds
from nanovllm.utils.context import Context, Prefixes
from nanovllm.utils.device import triton_refusal
from nanovllm.utils.fp8 import FP8
from nanovllm.utils.kv_cache import KVCache
from nanovllm.utils.scoring import Scoring

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
NUMBERS = (1, 128, 257)  # of queries: in tiles of 64 rows, of more, and by the kernel for Hopper


class TritonStore(AttentionBackend):
    """Stores keys and values with our Triton kernel; the base of the backends for GPUs."""

    supports_cuda_graph: ClassVar[bool] = True

    def __init__(self) -> None:
        from nanovllm.kernels.kv_cache import store_kvcache

        self._store = store_kvcache

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        self._store(k, v, cache, slot_mapping)


class TritonBackend(TritonStore):
    """Paged prefill and split-KV decode of `nanovllm.kernels`."""

    name: ClassVar[str] = "triton"
    captures_prompts: ClassVar[bool] = True

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if needs.fp8 and needs.head_dim < 32:  # pairs of columns are too few for tensor cores
            return f"reads an FP8 KV cache for head_dim from 32 on, not {needs.head_dim}"
        return triton_refusal(needs.device)

    def __init__(self) -> None:
        from nanovllm.kernels.paged_decode import MANY_PROGRAMS, paged_decode
        from nanovllm.kernels.paged_gather import gather_keys
        from nanovllm.kernels.paged_prefill import paged_prefill
        from nanovllm.kernels.paged_prefix import members_of_tile
        from nanovllm.kernels.paged_splits import choose_num_splits

        super().__init__()
        self._prefill, self._decode, self._gather = paged_prefill, paged_decode, gather_keys
        self._choose_num_splits, self._members_of_tile = choose_num_splits, members_of_tile
        self._many_programs = MANY_PROGRAMS

    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        return self._prefill(
            *qkv,
            cache,
            context.block_tables[context.num_decodes :],
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_q,
            context.num_keys,
            scoring,
            context.shared,
        )

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        n = q.shape[0]
        return self._decode(
            q,
            cache,
            context.block_tables[:n],
            context.context_lens[:n],
            scoring,
            prefixes=None if scoring.window else context.prefixes,
            shared=context.shared,
        )

    def most_own_decodes(self, head_dim: int) -> int:
        from nanovllm.kernels.paged_own import MOST_ROWS, takes_heads

        return MOST_ROWS if takes_heads(head_dim) else 0

    def members_of_tile(self, num_heads: int, num_kv_heads: int) -> int:
        return self._members_of_tile(num_heads, num_kv_heads)

    def most_gathered(self) -> int:
        from nanovllm.kernels.paged_prefill import MOST_GATHERED

        return MOST_GATHERED

    def variants(
        self, q: torch.Tensor, cache: KVCache, max_context: int, scorings: Iterable[Scoring]
    ) -> list[Callable[[], object]]:
        """Prefill of a token, of some and of many, decode by each number of splits and of many
        sequences, and of those that share prefixes.
        """
        _, _, num_kv_heads, head_dim = cache.k.shape
        k, fp8 = q[:, :num_kv_heads], cache.k.dtype == FP8
        table, [lens] = torch.zeros(2, 1, 2, dtype=torch.int32, device=q.device)
        calls: list[Callable[[], object]] = []
        if fp8:
            heads = slice(0, num_kv_heads)
            calls.append(partial(self._gather, cache, table, lens, 1, heads, q.dtype))
        for scoring in scorings:
            for n, num_keys in product(NUMBERS, (1, 2) if fp8 else (1,)):  # 2: one is cached
                args = q, k, k, cache, table, lens, lens, n, num_keys, scoring
                calls.append(partial(self._prefill, *args))
            most = self._choose_num_splits(1, num_kv_heads, head_dim, max_context, scoring.window)
            many = -(-self._many_programs // num_kv_heads)
            for batch, splits in ((1, most), (many, 1)):
                empty = lens.new_zeros(batch)  # context lengths
                queries, tables = q.repeat(batch, 1, 1), table.repeat(batch, 1)
                decode = partial(self._decode, queries, cache, tables, empty, scoring)
                numbers = [1 << i for i in range(splits.bit_length())]
                calls += [partial(decode, num_splits=num_splits) for num_splits in numbers]
                if not scoring.window:  # full batches share prefixes
                    prefixes = Prefixes(empty, *lens[:1].expand(3, 1))
                    calls.append(partial(decode, num_splits=1, prefixes=prefixes))
        return calls
