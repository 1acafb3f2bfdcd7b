"""The two ends of a model: token embedding and LM head, split along the vocabulary."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.bulk import Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build, Layer
from nanovllm.layers.sequence_parallel import embed_images, gather_owned_rows, sum_over_ranks
from nanovllm.layers.weights.int8_head import in_int8
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.layers.weights.tied import TiedWeight
from nanovllm.layers.weights.weight import PlainWeight, Weight
from nanovllm.tensors.image_rows import ImageRows


def vocab_span(vocab_size: int) -> int:
    """The number of tokens in a span, the unit in which the vocabulary is sampled and divided over
    ranks. A vocabulary has about 64 spans, so 1 to 8 ranks can share it.
    """
    return min(4096, max(16, 1 << max(0, (vocab_size - 1).bit_length() - 6)))


def local_vocab(vocab_size: int, rank: int, size: int) -> range:
    """The tokens of a rank: whole spans of the vocabulary; fewer or none for the last ranks."""
    span = vocab_span(vocab_size)
    per_rank = -(-vocab_size // (span * size)) * span
    start = rank * per_rank
    return range(start, min(start + per_rank, vocab_size)) if start < vocab_size else range(0)


def gather_vocab(logits: torch.Tensor, vocab_size: int, group: Group) -> torch.Tensor:
    """Gather all ranks' columns of logits: [n, len(vocab)] -> [n, V]."""
    if group.size == 1:
        return logits
    width = len(local_vocab(vocab_size, 0, group.size))  # the first rank has the most
    padded = F.pad(logits, (0, width - logits.shape[1]))
    whole = group.all_gather(padded).transpose(0, 1).flatten(1)
    return whole[:, :vocab_size].contiguous()


class VocabParallelEmbedding(Layer):
    """The token embedding: ids to hidden states. Its weight has the rows of `vocab`, or one row if
    this rank has none.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config, self.build = config, build
        # Rounded, as in training.
        rounded = torch.tensor(config.embedding_multiplier, dtype=build.dtype, device="cpu")
        self.multiplier = float(rounded)
        self.vocab = local_vocab(config.vocab_size, build.group.rank, build.group.size)
        self.weight = self._make_weight(max(1, len(self.vocab)), config.hidden_size)

    def _make_weight(self, num_rows: int, num_cols: int) -> Weight:
        # For so large a weight, the library is as fast as our kernels, even for one row.
        values = torch.zeros(num_rows, num_cols, dtype=self.build.dtype)
        return PlainWeight(values, fused=False, fixed_order=self.build.fixed_order)

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        rows = Part(self.vocab, self.config.vocab_size)
        return self.weight.shards(path, 0, rows, Part.whole(self.config.hidden_size))

    def forward(
        self, input_ids: torch.Tensor, images: ImageRows | None = None
    ) -> torch.Tensor | Scattered:
        """[T] int32 -> [T, M], or partial results (see `sum_over_ranks`). Rows of `images` are
        theirs.
        """
        group = self.build.group
        if group.size == 1:
            rows = F.embedding(input_ids, self.weight.data)
        else:
            rows = gather_owned_rows(self.weight.data, input_ids, self.vocab)
        if self.multiplier != 1.0:
            rows *= self.multiplier
        if images is not None:
            embed_images(rows, images, group)
        return sum_over_ranks(rows, group)


class ParallelLMHead(VocabParallelEmbedding):
    """The LM head: hidden states to logits over this rank's part of the vocabulary."""

    _embedding: tuple[VocabParallelEmbedding, ...] = ()  # no submodule

    def _make_weight(self, num_rows: int, num_cols: int) -> Weight:
        return in_int8(num_rows, num_cols, self.build) or super()._make_weight(num_rows, num_cols)

    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Have the values of the embedding, which the checkpoint stores once: share its memory, or
        be filled with it if this weight has another format.
        """
        self._embedding = (embedding,)
        if type(self.weight) is PlainWeight:
            self.weight = embedding.weight
        else:
            embedding.weight = TiedWeight(embedding.weight, self.weight)

    @property
    def embedding(self) -> VocabParallelEmbedding | None:
        """The embedding whose values this has; None if it has its own."""
        return next(iter(self._embedding), None)

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        return iter(()) if self._embedding else super().shards(path)

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, M] -> [B, len(vocab)], written to `out`: [B, weight.num_rows], if that is given."""
        out = self.weight.multiply(hidden, out=out)
        if self.config.logits_scaling != 1.0:
            out.div_(self.config.logits_scaling)
        if cap := self.config.final_logit_softcapping:
            out.div_(cap).tanh_().mul_(cap)
        return out[:, : len(self.vocab)]
