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
    """The requirements that a backend must meet."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_size: int
    softcap: bool = False  # see `Scoring`
    sinks: bool = False
    fp8: bool = False  # whether keys and values are in 8 bits, see `KVCache`
    batch_invariant: bool = False  # whether a token's result must not depend on others, see `Build`


class QKV(NamedTuple):
    """Queries [T, Hq, D], keys and values [T, Hkv, D] of the tokens of a step."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class AttentionBackend(ABC):
    """Causal attention of a step's tokens to the paged KV cache.

    `context` has the tokens' sequences and slots. A backend never reads a block, or a slot, beyond
    the context of a sequence.
    """

    name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool]  # for decodes
    captures_prompts: ClassVar[bool] = False  # in CUDA graphs with room for more prompt tokens
    # Whether prompts are attended to `ImageRows.limits`; else `attend_in_images` does it again.
    attends_in_images: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """The reason why this backend cannot run `needs`; None if it can."""

    @abstractmethod
    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Write k, v [T, Hkv, D] to their slots [T] int32; those with slot -1 are skipped."""

    def attend(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        """Attend for all rows of a step. Returns [T, Hq, D]. Keys and values are stored already,
        and have the same values as the cache (`rounded`, if it is FP8).
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
        """Attend for the prefill rows of a step, as `attend`."""

    @abstractmethod
    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        """Attend for the decode rows of a step, the first `context.num_decodes`. q: [B, Hq, D]."""

    def max_fused_decodes(self, head_dim: int) -> int:
        """The largest batch for `kernels.attention.decode_few`, which rotates, stores and
        attends; 0: it cannot be used.
        """
        return 0

    def members_of_tile(self, num_heads: int, num_kv_heads: int) -> int:
        """The maximum number of decodes in a tile of a shared prefix (`Context.prefixes`); 0: this
        backend reads each decode's prefix by itself.
        """
        return 0

    def max_gathered(self) -> int:
        """The maximum number of bytes that a step over an FP8 cache uses for its gathered context,
        beside its activations.
        """
        return 0
