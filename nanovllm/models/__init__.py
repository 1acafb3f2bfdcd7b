"""Models, one file each, and the loader that fills them.

Doors: `model_class`; `loader`; `qwen3`, the class that others derive from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nanovllm.checkpoint.families import FAMILIES

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3ForCausalLM


def model_class(architecture: str) -> type[Qwen3ForCausalLM]:
    """The class of a supported architecture. Imports its file."""
    module, _, name = FAMILIES[architecture].model.partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
