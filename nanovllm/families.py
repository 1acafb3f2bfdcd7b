"""The registry of architectures: what each name in config.json stands for.

`ModelConfig` reads it before anything is built, so it imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Family(NamedTuple):
    """A model, and what the name of an architecture says of it beside config.json.

    Attributes:
        model: the class, as `file.Class` in models/.
        qk_norm: attention normalises queries and keys, each head for itself.
        qkv_bias, output_bias: whether attention's projections have biases; None: config.json says
            it as `attention_bias`.
        head_dim: where config.json has none; None: `hidden_size / num_attention_heads`.
    """

    model: str
    qk_norm: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    head_dim: int | None = None

    def load(self) -> type[Qwen3ForCausalLM]:
        """The class, imported."""
        module, _, name = self.model.partition(".")
        return getattr(importlib.import_module(f"nanovllm.models.{module}"), name)


_QWEN3 = "qwen3.Qwen3ForCausalLM"  # Llama and Qwen2 differ from it in the facts given here
FAMILIES = {
    "LlamaForCausalLM": Family(_QWEN3),
    "Qwen2ForCausalLM": Family(_QWEN3, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Family(_QWEN3, qk_norm=True, head_dim=128),
}
