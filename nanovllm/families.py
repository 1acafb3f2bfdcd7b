"""The registry of architectures: what each name in config.json stands for. Imports no torch."""

from typing import NamedTuple


class Family(NamedTuple):
    """A model, and what the name of an architecture says of it beside config.json.

    Attributes:
        model: the class, as `file.Class` in models/.
        qk_norm: attention normalises queries and keys, each head for itself.
        qkv_bias, output_bias: whether attention's projections have biases; None: config.json says
            it as `attention_bias`.
        mlp_bias: whether config.json may ask for biases in the MLP.
        head_dim: where config.json has none; None: `hidden_size / num_attention_heads`.
        rope_theta: where config.json has none; None: it must have one.
    """

    model: str
    qk_norm: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool = False
    head_dim: int | None = None
    rope_theta: float | None = None


QWEN3 = "qwen3.Qwen3ForCausalLM"  # Llama and Qwen2 differ from it in the facts given here
FAMILIES = {
    "LlamaForCausalLM": Family(QWEN3, mlp_bias=True, rope_theta=10_000.0),
    "Qwen2ForCausalLM": Family(QWEN3, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Family(QWEN3, qk_norm=True, head_dim=128),
}
