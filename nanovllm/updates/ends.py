"""The ends of a tied model, its embedding and its LM head: an update may bring both."""

from collections.abc import Iterable

from nanovllm.checkpoint.names import EMBEDDING, HEAD
from nanovllm.tensors.source import same_values
from nanovllm.updates.ledger import Expected
from nanovllm.updates.parcel import Named

NOT_TIED = (
    f"{HEAD} differs from {EMBEDDING}, but the model ties them: save its checkpoint with "
    "`tie_word_embeddings` false, and build the engine from that"
)


def check_ends(expected: Expected, tensors: Iterable[Named]) -> None:
    """Refuse both ends of a tied model, if they come together and differ.

    Args:
        expected: tensors of the model.
        tensors: tensors by the model's names.

    Raises:
        ValueError: with the remedy.
    """
    found = {name: tensor for name, tensor in tensors if name in (EMBEDDING, HEAD)}
    if not expected.is_tied or len(found) < 2:
        return
    head, embedding = found[HEAD], found[EMBEDDING]
    if not same_values(embedding, head.to(embedding.device, embedding.dtype)):
        raise ValueError(NOT_TIED)
