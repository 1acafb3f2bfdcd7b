"""nanovllm: offline LLM inference in the nano-vLLM design.

Importing the package is light: `LLM` (which needs torch) is loaded on first use, so that the host
logic (sequences, blocks, scheduling) imports without torch, and nothing looks at the hardware.
"""

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanovllm.threads.forks  # noqa: F401 (it remembers the process that has imported this)
from nanovllm import sampling_params
from nanovllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
    TokenLogprobs,
)
from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.options import missing_name

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM
    from nanovllm.ranks.processes import WorkerError
    from nanovllm.requests.inputs import TextPrompt, TokensPrompt
    from nanovllm.updates.sharing import share_weights

__version__ = "0.1.0"
# Directory of a checkpoint of 0.9 million parameters, a part of the package: for first steps and
# tests. `scripts/train_tiny.py` of the repository made it.
TINY = str(Path(__file__).parent / "tiny-qwen3")
__all__ = [
    "LLM",
    "TINY",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenLogprobs",
    "TokensPrompt",
    "WorkerError",
    "share_weights",
]

REPLACED = {  # names of vLLM
    **sampling_params.REPLACED,
    "AsyncEngineArgs": "pass its options to AsyncLLM",
    "AsyncLLMEngine": "use AsyncLLM",
    "EngineArgs": "pass its options to LLM",
    "LoRARequest": "pass the adapter to LLM(model, adapter=path) or load_adapter(path)",
    "PoolingParams": "pass pooling and normalize to embed()",
}
LAZY = {
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.async_llm",
    "TextPrompt": "nanovllm.requests.inputs",
    "TokensPrompt": "nanovllm.requests.inputs",
    "WorkerError": "nanovllm.ranks.processes",
    "share_weights": "nanovllm.updates.sharing",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise missing_name(__name__, name, REPLACED)
    try:
        module = importlib.import_module(LAZY[name])
    except AttributeError as error:  # of which Python would say only "cannot import name"
        raise ImportError(f"{LAZY[name]} cannot be imported: AttributeError: {error}") from error
    return getattr(module, name)
