"""Attention backends, one file each with one interface, and the choice of one.

Doors: `select_backend`; `base`, the interface; `triton_backend`, for the heads that it can do;
`images`, for tokens that see those after them.
"""

from nanovllm.attention.base import AttentionBackend, AttentionNeeds
from nanovllm.attention.flash_attn_backend import FlashAttentionBackend
from nanovllm.attention.invariant_backend import InvariantBackend
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend

# The fastest first, as measured (docs/experiments.md).
BACKENDS: list[type[AttentionBackend]] = [TritonBackend, FlashAttentionBackend, TorchBackend]


def select_backend(choice: str, needs: AttentionNeeds) -> tuple[AttentionBackend, str]:
    """The backend for `attention_backend=choice`; "auto" selects the fastest that can run.

    Returns:
        The backend, and the reason for it rather than one before it.

    Raises:
        ValueError: if the chosen backend cannot run here, with every candidate's reason.
    """
    if choice == "auto" and needs.device.type == "cpu":
        return TorchBackend(), "the one for CPUs"  # Triton's interpreter is for tests
    backends = BACKENDS
    if needs.batch_invariant:
        backends = [InvariantBackend, FlashAttentionBackend, TorchBackend]
    refusals: list[str] = []
    for backend in backends:
        if choice in ("auto", backend.name):
            refusal = backend.refusal(needs)
            if refusal is None:
                reason = "; ".join(refusals) or ("the fastest" if choice == "auto" else "as chosen")
                return backend(), reason
            refusals.append(f"{backend.name}: {refusal}")
    refused = "; ".join(f"{b.name}: {why}" for b in backends if (why := b.refusal(needs)))
    raise ValueError(
        f"attention_backend={choice!r} cannot be used here ({refused}); "
        "use attention_backend='auto'"
    )
