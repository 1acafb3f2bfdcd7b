"""What layers are told when they are built, and what they tell the loader and the runner."""

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.weights.shard import Shard
from nanovllm.tensors.fp8 import Codes

# Between layers: [T, M] in some state.
Hidden: TypeAlias = torch.Tensor | Codes | Scattered | Gathered


class Build(NamedTuple):
    """What all layers of a model are built with.

    Attributes:
        dtype: of the parameters.
        fused: take our kernels where they are faster.
        group: the ranks that the model is split over.
        backend: what attends.
        max_model_len: tokens of the longest sequence.
        block_size: tokens of a block of the KV cache.
        cache_dtype: of the KV cache; None: `dtype`.
        quantization: of the matrices of linear layers.
        decode_tokens: rows of a step that are decodes of one sequence, at most.
    """

    dtype: torch.dtype
    fused: bool
    group: Group
    backend: AttentionBackend
    max_model_len: int
    block_size: int = 256
    cache_dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    decode_tokens: int = 1


class Layer(nn.Module):
    """A layer with parameters."""

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        """The checkpoint's tensors that fill this layer, and what of it each fills.

        Args:
            path: of this layer in the model, which names it in the checkpoint.
        """
        for name, param in self.named_parameters(recurse=False):
            yield f"{path}.{name}", Shard.whole(param.data)


class State(NamedTuple):
    """A tensor that a layer keeps from step to step.

    Attributes:
        shape: of what it keeps of one KV block, or of one sequence.
        dtype: torch.dtype of the tensor.
        by_sequence: False: a row for each KV block, [N, *shape]. True: one for each slot, the last
            for padding, [max_num_seqs + 1, *shape]; see `Context.slots`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_sequence: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a block or a sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


class StatefulLayer(Layer):
    """A layer that keeps tensors from step to step. The engine's pool asks for them, and binds them
    before the first step. Rows are never cleared: whatever reads one has written it.
    """

    def states(self) -> dict[str, State]:
        """What it keeps, by name."""
        raise NotImplementedError

    def bind(self, **tensors: torch.Tensor) -> None:
        """Use these tensors of its `states` from now on."""
        raise NotImplementedError


class MLP(nn.Module):
    """What stands behind attention: [T, M] -> [T, M].

    Attributes:
        act_block: see `Weight`, of its first product.
    """

    act_block: int | None = None
