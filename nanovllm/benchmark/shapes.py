"""config.json of published checkpoints, for random weights in their shapes."""

from functools import partial
from typing import Any

_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings", "eos_token_id"),
)


def _config(architecture: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """A config.json in bf16 with these sizes."""
    by_name = dict(zip(_SIZES, sizes, strict=True))
    return {"architectures": [architecture], "torch_dtype": "bfloat16", **by_name, **others}


_qwen3 = partial(
    _config, "Qwen3ForCausalLM", 151936, head_dim=128, rms_norm_eps=1e-6, rope_theta=1000000
)


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    """The config.json of gpt-oss, whose experts are in MXFP4."""
    return _config(
        *("GptOssForCausalLM", 201088, 2880, num_layers, 64, 8, 2880, 131072, 200002),
        head_dim=64,
        num_local_experts=num_experts,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        rope_theta=150000,
        sliding_window=128,
        tie_word_embeddings=False,
        quantization_config={"quant_method": "mxfp4"},
    )


def _qwen3_5(*sizes: int, **others: Any) -> dict[str, Any]:
    """Qwen3.5 of the sizes from the hidden one to the intermediate one. 3.6 and 3.8-27B have the
    same shapes.
    """
    return {
        **_config("Qwen3_5ForCausalLM", 248320, *sizes, 262144, 248044),
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        **others,
    }


_INT8 = {"type": "int", "num_bits": 8, "symmetric": True}
# Like published checkpoints: in 4 bits, and in INT8 with activations in INT8.
DUMMY_QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _INT8 | {"strategy": "channel"},
                "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
            }
        },
    },
}
# Positional arguments are those of _SIZES: vocabulary, hidden, layers, heads, KV heads, ...
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, 40960, 151645, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, 40960, 151645, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288, 40960, 151645, tie_word_embeddings=False),
    "qwen3-30b-a3b": _qwen3(
        *(2048, 48, 32, 4, 6144, 40960, 151645),
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "qwen3.5-0.8b": _qwen3_5(1024, 24, 8, 2, 3584, tie_word_embeddings=True),
    "qwen3.5-4b": _qwen3_5(
        2560, 32, 16, 4, 9216, linear_num_value_heads=32, tie_word_embeddings=True
    ),
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 12288, linear_num_value_heads=32),
    "qwen3.5-27b": _qwen3_5(5120, 64, 24, 4, 17408, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _qwen3_5(
        *(2048, 40, 16, 2, 0),
        architectures=["Qwen3_5MoeForCausalLM"],
        intermediate_size=None,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        shared_expert_intermediate_size=512,
    ),
    "lfm2-1.2b": _config(
        *("Lfm2ForCausalLM", 65536, 2048, 16, 32, 8, 12288, 128000, 7),
        norm_eps=1e-5,
        rope_theta=1000000,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        conv_L_cache=3,
        block_multiple_of=256,
        tie_word_embeddings=True,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-3-4b": _config(
        *("Gemma3ForCausalLM", 262208, 2560, 34, 8, 4, 10240, 131072, 1),
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        rope_theta=1000000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "mistral-7b": _config(
        *("MistralForCausalLM", 32768, 4096, 32, 32, 8, 14336, 32768, 2),
        rms_norm_eps=1e-5,
        rope_theta=1000000,
        tie_word_embeddings=False,
    ),
    "llama-3.1-8b": _config(
        *("LlamaForCausalLM", 128256, 4096, 32, 32, 8, 14336, 131072, 128009),
        rms_norm_eps=1e-5,
        rope_theta=500000,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
    ),
    "qwen2.5-7b": _config(
        *("Qwen2ForCausalLM", 152064, 3584, 28, 28, 4, 18944, 32768, 151645),
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        tie_word_embeddings=False,
    ),
}
