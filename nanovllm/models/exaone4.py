"""EXAONE 4 (LG AI Research, 2025): OLMo 2's layers with Qwen3's attention."""

from nanovllm.models.olmo2 import Olmo2DecoderLayer, Olmo2ForCausalLM
from nanovllm.models.qwen3 import Qwen3Attention


class Exaone4DecoderLayer(Olmo2DecoderLayer):
    """x = x + norm(attention(x)); x = x + norm(mlp(x))"""

    attention_class = Qwen3Attention


class Exaone4ForCausalLM(Olmo2ForCausalLM):
    """EXAONE 4."""

    layer_class = Exaone4DecoderLayer
