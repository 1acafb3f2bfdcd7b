"""The model architectures, by the name in config.json. One file each."""

from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[Qwen3ForCausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
