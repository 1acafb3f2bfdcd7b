"""The model architectures, by the name in config.json. One file each."""

from torch import nn

from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[nn.Module]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
