"""The interface of an attention backend, and the choice of one at construction."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.utils.context import Context

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionNeeds:
    """What a backend is asked to run."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class AttentionBackend(ABC):
    """Causal attention of a step's tokens to the paged KV cache.

    In all methods the caches are [N, S, Hkv, D], and `context` says where tokens belong. A
    backend never reads a block, or a slot, beyond the context of a sequence.
    """

    name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool]

    @classmethod
    @abstractmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot run `needs`, or None if it can."""

    @abstractmethod
    def store_kvcache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write k, v [T, Hkv, D] into their slots [T] int32; -1 is skipped."""

    @abstractmethod
    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """The prefill rows of a step. q: [T, Hq, D]; k, v: [T, Hkv, D], stored already."""

    @abstractmethod
    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """The decode rows of a step, the first `context.num_decodes`. q: [B, Hq, D]."""


def select_backend(choice: str, needs: AttentionNeeds) -> AttentionBackend:
    """The backend that `attention_backend=choice` asks for; "auto" takes the first that can.

    Raises:
        ValueError: if the choice cannot be had, with every candidate's reason.
    """
    from nanovllm.attention.flash_attn_backend import FlashAttentionBackend
    from nanovllm.attention.torch_backend import TorchBackend
    from nanovllm.attention.triton_backend import TritonBackend

    backends: list[type[AttentionBackend]] = [FlashAttentionBackend, TritonBackend, TorchBackend]
    refusals = {backend.name: backend.refusal(needs) for backend in backends}
    usable = [backend for backend in backends if refusals[backend.name] is None]
    report = "; ".join(f"{name}: {why or 'usable'}" for name, why in refusals.items())
    if choice == "auto":
        if needs.device.type == "cpu":
            usable = [TorchBackend]  # Triton's interpreter is for tests
        logger.debug("attention backends: %s", report)
        return usable[0]()
    for backend in usable:
        if backend.name == choice:
            return backend()
    raise ValueError(
        f"attention_backend={choice!r} cannot be used here ({report}); use attention_backend='auto'"
    )
