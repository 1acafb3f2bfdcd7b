"""The interface of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context


@dataclass(frozen=True)
class AttentionNeeds:
    """What a backend is asked to run."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_size: int
    softcap: bool = False  # see `Scoring`
    sinks: bool = False
    fp8: bool = False  # keys and values in 8 bits, see `KVCache`


class QKV(NamedTuple):
    """Queries [T, Hq, D], keys and values [T, Hkv, D] of the tokens of a step."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class AttentionBackend(ABC):
    """Causal attention of a step's tokens to the paged KV cache.

    `context` says where the tokens belong. A backend never reads a block, or a slot, beyond the
    context of a sequence.
    """

    name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool]  # of decodes
    captures_prompts: ClassVar[bool] = False  # in CUDA graphs that have room for more of them

    @classmethod
    @abstractmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot run `needs`, or None if it can."""

    @abstractmethod
    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Write k, v [T, Hkv, D] into their slots [T] int32; -1 is skipped."""

    def attend(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        """All rows of a step: [T, Hq, D]. Keys and values are stored already, and have the numbers
        that the cache has (`rounded`, if it is FP8).
        """
        n = context.num_decodes
        if n == len(qkv.q):
            return self.decode(qkv.q, cache, context, scoring)
        if n == 0:
            return self.prefill(qkv, cache, context, scoring)
        decoded = self.decode(qkv.q[:n], cache, context, scoring)
        rest = self.prefill(QKV(*(x[n:] for x in qkv)), cache, context, scoring)
        return torch.cat([decoded, rest])

    @abstractmethod
    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        """The prefill rows of a step, as `attend`."""

    @abstractmethod
    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        """The decode rows of a step, the first `context.num_decodes`. q: [B, Hq, D]."""

    def max_fused_decodes(self, head_dim: int) -> int:
        """The largest batch that `kernels.attention.fused_decode` rotates, stores and attends;
        0: none.
        """
        return 0

    def members_of_tile(self, num_heads: int, num_kv_heads: int) -> int:
        """Decodes of a tile of shared prefixes (`Context.prefixes`); 0: it reads each by itself."""
        return 0

    def max_gathered(self) -> int:
        """Bytes that a step over an FP8 cache may take for its context, beside its activations."""
        return 0
