"""Engines whose weights are replaced, beside one that is built with the new ones."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks_in_threads import ThreadedExecutor
from safetensors.torch import load_file, save_file

from checkpoints import SMALL, copy_checkpoint, greedy, make_checkpoint
from nanovllm import LLM, SamplingParams, share_weights
from nanovllm.engine import llm_engine

# More than a block each, so that the second run of them hits the prefix cache.
RNG = random.Random(61)
PROMPTS = [[RNG.randrange(127) for _ in range(n)] for n in (17, 70, 33)]
PARAMS = [
    greedy(3, logprobs=2),
    SamplingParams(seed=5, max_tokens=3, logprobs=2, n=2),  # models with states cache its prompt
    greedy(1, prompt_logprobs=0),
]


def with_other_values(path: Path, other: Path, *kept: str) -> Path:
    """A checkpoint like `path` whose tensors have their values in another order, but those whose
    names end with one of `kept`.
    """
    copy_checkpoint(path, other)
    file = other / "model.safetensors"
    tensors = {
        name: tensor if kept and name.endswith(kept) else reversed_values(tensor)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    return other


def two_checkpoints(directory: Path, **shape: Any) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    path = make_checkpoint(directory / "old", **shape)
    return path, with_other_values(path, directory / "new")


def reversed_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the opposite order."""
    plain = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return plain.flatten().flip(0).view(plain.shape).contiguous().view(tensor.dtype)


def results(llm: LLM) -> list[Any]:
    """Tokens, log-probabilities and embeddings, and again those of a run that hits the cache."""
    found: list[Any] = []
    for _ in range(2):
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
            for each in output.outputs:
                found += [each.token_ids, list(each.logprobs or [])]
            found.append(list(output.prompt_logprobs or []))
    found += [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    return found


def assert_weights_change(path: Path, other: Path, **options: Any) -> None:
    """An engine of `path` becomes one of `other`, and one of `path` again: bit for bit."""
    options = {**SMALL, "num_kvcache_blocks": 64, **options}
    with pytest.MonkeyPatch.context() as patch:
        if options.get("tensor_parallel_size", 1) > 1:  # two numbers have one sum everywhere
            patch.setattr(llm_engine, "Executor", ThreadedExecutor)
        with LLM(str(other), **options) as fresh:
            wanted = results(fresh)
    old, new = (load_file(each / "model.safetensors") for each in (path, other))
    with LLM(str(path), **options) as llm:
        before = results(llm)
        assert before != wanted
        hits = llm.metrics()["num_cached_tokens"]
        assert hits > 0
        llm.update_weights(new)
        assert llm.weight_version == 1
        assert results(llm) == wanted
        assert llm.metrics()["num_cached_tokens"] == 2 * hits, "not again from the cache"
        names = sorted(old, key=lambda name: RNG.random())
        llm.update_weights((name, as_float64(old[name])) for name in names)
        assert results(llm) == before


def assert_models_fit(
    path: Path, other: Path, kind: Any = transformers.AutoModelForCausalLM, **options: Any
) -> None:
    """An engine of `path` becomes one of `other` by the tensors of a model of transformers: all at
    once, one after another, and in two parts of another process.
    """
    options = {**SMALL, "num_kvcache_blocks": 64, **options}
    with LLM(str(other), **options) as fresh:
        wanted = results(fresh)
    old = load_file(path / "model.safetensors")
    new = kind.from_pretrained(other, dtype=torch.float32).state_dict()
    with LLM(str(path), **options) as llm:
        llm.update_weights(new)
        assert results(llm) == wanted
        llm.update_weights(old)
        assert results(llm) != wanted
        llm.update_weights(iter(new.items()))
        assert results(llm) == wanted
        llm.update_weights(old)
        llm.start_weight_update()
        names = sorted(new, key=lambda name: RNG.random())
        for some in (names[::2], names[1::2]):
            with share_weights({name: new[name] for name in some}) as message:
                llm.update_weights_ipc(message)
        llm.finish_weight_update()
        assert results(llm) == wanted


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another dtype, if they are not codes."""
    is_plain = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return tensor.double() if is_plain else tensor
