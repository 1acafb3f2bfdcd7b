"""The interface of layers: options to build them, `Shard`s for the loader, states for the pool."""

import math
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.weights.shard import Shard
from nanovllm.tensors.fp8 import Codes

# Hidden states [T, M] between layers: values, FP8 codes, or rows spread over the ranks.
Hidden: TypeAlias = torch.Tensor | Codes | Scattered | Gathered


class Build(NamedTuple):
    """The options that all layers of a model are built with.

    Attributes:
        dtype: torch.dtype of the parameters.
        fused: whether our kernels are used where they are faster.
        group: ranks that the model is split over.
        backend: attention backend.
        max_model_len: maximum length of a sequence, in tokens.
        block_size: tokens per block of the KV cache.
        cache_dtype: torch.dtype of the KV cache; None: `dtype`.
        quantization: quantisation of the linear layers; None: values of `dtype`.
        decode_tokens: maximum number of rows of a step that are decodes of one sequence.
        batch_invariant: whether a token's results have the same bits whatever else is in its step.
        path: path in the model of the module that is being built, which is its name in the
            checkpoint.
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
    batch_invariant: bool = False
    path: str = ""

    @property
    def fixed_order(self) -> bool:
        """Whether kernels add up the numbers of a row in one order, whatever the number of rows,
        for `batch_invariant`.
        """
        return self.batch_invariant and self.fused

    @property
    def one_by_one(self) -> bool:
        """Whether a step's tokens are computed one by one: `batch_invariant` without kernels."""
        return self.batch_invariant and not self.fused

    def at(self, name: str) -> "Build":
        """The options of a module inside the one that is being built."""
        return self._replace(path=f"{self.path}.{name}".lstrip("."))


class Layer(nn.Module):
    """A layer with parameters."""

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        """The names of the checkpoint tensors that fill this layer, each with its `Shard`.

        Args:
            path: path of this layer in the model, which is its name in the checkpoint.
        """
        for name, param in self.named_parameters(recurse=False):
            yield f"{path}.{name}", Shard.whole(param.data)


class Per(Enum):
    """Owners of the rows of a state."""

    BLOCK = auto()  # KV blocks: [N, ...]
    SEQUENCE = auto()  # slots of sequences, row 0 for padding, see `Context.slots`: [R, ...]


class State(NamedTuple):
    """A tensor that a layer keeps from step to step.

    Attributes:
        shape: shape of a row, which belongs to one KV block or to one sequence.
        dtype: torch.dtype of the tensor.
        per: owners of the rows.
        window: number of tokens of a sequence, the newest included, whose blocks the layer reads;
            0: those of all.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: Per = Per.BLOCK
    window: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes per KV block or sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


class StatefulLayer(Layer):
    """A layer that keeps tensors from step to step. The engine's pool allocates its `states`, and
    binds them before the first step. Rows are never cleared: a layer uses no row before it has
    written it.
    """

    def states(self) -> dict[str, State]:
        """The states that the layer keeps, by name."""
        raise NotImplementedError

    def bind(self, **tensors: torch.Tensor) -> None:
        """Use these tensors for its `states` from now on."""
        raise NotImplementedError


class MLP(nn.Module):
    """The part of a decoder layer after attention: [T, M] -> [T, M].

    Attributes:
        act_block: `Weight.act_block` of its first product.
    """

    act_block: int | None = None
