"""The model families against transformers: what distinguishes them from Qwen3, and from each other.

Small random checkpoints, greedy, on one rank and on two.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import DEVICE as KERNEL_DEVICE
from ranks_in_threads import ranks_of, threads_fixture  # noqa: F401
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import LLAMA3, PARAMS, PROMPTS, SMALL, make_checkpoint, references, tokens
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import LayerConfig, ModelConfig
from nanovllm.models import model_class
from nanovllm.models.loader import load_model
from nanovllm.rope import RopeParameters
from nanovllm.utils.context import Context, use_context

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a KV head for each query": ("llama", {"num_key_value_heads": 4, "seed": 1}),
    "llama, products in tiles": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "initializer_range": 0.1,
        },
    ),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"attention_bias": True}),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = CHECKPOINTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("families") / "model", family, **options)


def generate(path: Path, **options: Any) -> list[list[int]]:
    with LLM(path, **SMALL, **options) as llm:
        return tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_tokens_are_those_of_transformers(path: Path) -> None:
    assert generate(path) == references(path)


@pytest.mark.usefixtures("threads")
def test_tokens_of_two_ranks_are_those_of_transformers(path: Path) -> None:
    with LLM(path, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == references(path)


def test_fused_layers_compute_what_plain_layers_do(path: Path) -> None:
    """A prefill and a decode step, the fused one through Triton's interpreter where there is no
    GPU: biases and norms must not get lost in a kernel.
    """
    pytest.importorskip("triton")
    config = ModelConfig.from_pretrained(str(path))
    states: list[list[torch.Tensor]] = []
    for fused in (False, True):
        build = Build(torch.float16, fused, Group(), TorchBackend(), 64)
        with torch.device(KERNEL_DEVICE), torch.inference_mode():
            model = model_class(config.architecture)(config, build)
            load_model(model, path)
            cache = torch.zeros(
                config.num_hidden_layers, 2, 1, 16, config.num_key_value_heads, config.head_dim
            ).half()
            for layer, (k, v) in zip(model.model.layers, cache, strict=True):
                layer.self_attn.attn.bind_kv_cache(layer.self_attn.attn.cache._make((k, v)))
            ids = torch.tensor([5, 77, 33, 101, 9, 5], dtype=torch.int32)
            positions, table = torch.arange(6, dtype=torch.int32), torch.zeros(1, 1).int()
            lens = torch.tensor([0, 5]).int()
            prefill = Context(0, positions[:5], lens[1:], table, lens, lens, 5, 5)
            with use_context(prefill):
                prefilled = model(ids[:5], positions[:5])
            with use_context(Context(1, positions[5:], lens[1:] + 1, table)):
                states.append([prefilled, model(ids[5:], positions[5:])])
    for plain, fused_states in zip(*states, strict=True):
        torch.testing.assert_close(fused_states, plain, atol=3e-2, rtol=3e-2)


# -- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "factor", "max_position"), [(128, 8.0, 131072), (64, 32.0, 131072)]
)
def test_llama3_frequencies_are_those_of_transformers(
    head_dim: int, factor: float, max_position: int
) -> None:
    """Of Llama 3.1 8B and 3.2 1B, as published."""
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
    }
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32 * head_dim,
        num_attention_heads=32,
        max_position_embeddings=max_position,
        rope_parameters=scaling,
    )
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1.0
    rope = RotaryEmbedding(head_dim, 2, RopeParameters(rotary_dim=head_dim, **scaling))
    cos, sin = rope.cos_sin[1].chunk(2)
    torch.testing.assert_close(torch.atan2(sin, cos), wanted, rtol=1e-5, atol=1e-9)


LLAMA32 = RopeParameters(
    500000.0,
    64,
    "llama3",
    factor=32.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-2-7b-hf": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vocab_size": 32000,
            "eos_token_id": 2,
        },
        {
            "head_dim": 128,
            "layers": (LayerConfig(RopeParameters(10000.0, 128)),) * 32,
            "qk_norm": False,
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "eos_token_ids": frozenset({2}),
        },
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        {
            "head_dim": 64,
            "layers": (LayerConfig(LLAMA32),) * 16,
            "eos_token_ids": frozenset({128001, 128008, 128009}),
        },
    ),
    "Qwen2.5-7B-Instruct": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        {
            "head_dim": 128,
            "layers": (LayerConfig(RopeParameters(1000000.0, 128)),) * 28,
            "qk_norm": False,
            "qkv_bias": True,
            "output_bias": False,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str, tmp_path: Path) -> None:
    raw, wanted = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(str(tmp_path))
    assert {field: getattr(config, field) for field in wanted} == wanted
