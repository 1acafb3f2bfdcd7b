"""Tiny random checkpoints, and what transformers generates from them."""

import functools
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from invariants import check_scheduler
from safetensors.torch import load_file, save_file

import nanovllm
from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.engine.step_inputs import PendingTokens

TINY = Path(nanovllm.TINY)
VOCAB = 128
PROMPT = [5, 77, 33, 101, 9]

LLAMA3 = {  # RoPE of Llama 3.1, with an original context that `PROMPTS` go beyond
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# An engine that fits any of these checkpoints and is built in milliseconds.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def make_checkpoint(
    path: Path, family: str = "qwen3", *, seed: int = 0, shard: str = "1GB", **overrides: Any
) -> Path:
    """Save a random model without tokenizer and without end-of-sequence tokens.

    Args:
        family: `model_type` in transformers.
    """
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # decided logits, and outputs that depend on the prompt
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":  # the others divide the hidden size by the heads
        options["head_dim"] = 32
    config = transformers.AutoConfig.for_model(family, **{**options, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith(
                "bias"
            ):  # norms and biases: without noise all 1 and all 0
                param.data += 0.2 * torch.randn_like(param)
    model.generation_config.eos_token_id = config.eos_token_id = None  # some have their own
    model.save_pretrained(path, max_shard_size=shard)
    return path


def small_config(directory: Path, **changes: Any) -> ModelConfig:
    """Facts of a Llama with one layer, as config.json says them."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_pretrained(str(directory))


def qwen3_06b_config(**overrides: Any) -> transformers.Qwen3Config:
    """The shape of Qwen3-0.6B."""
    options = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    return transformers.Qwen3Config(**{**options, **overrides})


def copy_checkpoint(source: Path, path: Path, **changes: Any) -> Path:
    """A copy with other values in config.json."""
    shutil.copytree(source, path, copy_function=shutil.copyfile)
    edit_json(path / "config.json", **changes)
    return path


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file, or begin one."""
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**values, **changes}))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of model.safetensors (`__` is a dot in a name); None removes one."""
    file = path / "model.safetensors"
    renamed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {**load_file(file), **renamed}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


def stack_experts(path: Path) -> None:
    """Rewrite experts one by one as published files have them: in one tensor for all."""
    left, of_each = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        parent, found, rest = name.partition(".mlp.experts.")
        if found:
            i, part = rest.removesuffix(".weight").split(".")
            of_each.setdefault(parent, {})[int(i), part] = tensor
        else:
            left[name] = tensor
    assert of_each
    for parent, parts in of_each.items():
        rows = [(parts[i, "gate_proj"], parts[i, "up_proj"]) for i in range(len(parts) // 3)]
        both = torch.stack([torch.cat(pair) for pair in rows])
        down = torch.stack([parts[i, "down_proj"] for i in range(len(parts) // 3)])
        left[f"{parent}.mlp.experts.gate_up_proj"] = both
        left[f"{parent}.mlp.experts.down_proj"] = down
    save_file(left, path / "model.safetensors")


@functools.cache
def reference_model(path: Path) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, float32 on the CPU."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()


@functools.cache
def _reference(path: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(max_tokens):
        with torch.inference_mode():
            ids.append(int(reference_model(path)(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def reference(path: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy continuation of `prompt` by transformers, without any cache."""
    return list(_reference(path, tuple(prompt), max_tokens))


@functools.lru_cache(1000)
def _logits(path: Path, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return reference_model(path)(torch.tensor([ids])).logits[0]


def assert_greedy(path: Path, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """The tokens are those of `reference`: each is the likeliest after those before it. So one
    pass of the model is enough for each output.
    """
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output["token_ids"]
        wanted = _logits(path, (*prompt, *found))[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert found and found == wanted, f"of a prompt of {len(prompt)} tokens"


def reference_logprobs(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each token of a text by transformers: [n, V] float32."""
    return _logits(path, tuple(token_ids)).log_softmax(-1)


def reference_hidden(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Hidden states after the final norm by transformers: [n, M] float32."""
    with torch.inference_mode():
        return reference_model(path).model(torch.tensor([token_ids])).last_hidden_state[0]


def rare(*values: Any) -> Any:
    """A parameter that only `-m slow` tries."""
    return pytest.param(*values, marks=pytest.mark.slow)


def with_rare(every: Iterable[str], *seldom: str) -> list[Any]:
    """Parameters, of which only `-m slow` tries those of `seldom`."""
    every = list(every)
    assert set(every) >= set(seldom), "no such name"
    return [rare(name) if name in seldom else name for name in every]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


# A workload: several prompts in a step, one in chunks, two with a common prefix.
PROMPTS = [PROMPT, [7] * 20, list(range(90)), [3, 4], [7] * 20]
LENGTHS = [6, 1, 12, 9, 4]
PARAMS = [greedy(n) for n in LENGTHS]


def references(
    path: Path, prompts: list[list[int]] = PROMPTS, lengths: list[int] = LENGTHS
) -> list[list[int]]:
    """The greedy continuations of prompts by transformers, of these lengths."""
    return [reference(path, p, n) for p, n in zip(prompts, lengths, strict=True)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of what `generate` returned."""
    return [output["token_ids"] for output in outputs]


def assert_right(path: Path, outputs: list[RequestOutput]) -> None:
    """They are `references`, for less: of a checkpoint that only one test has."""
    assert [len(found) for found in tokens(outputs)] == LENGTHS
    assert_greedy(path, PROMPTS, outputs)


def add_all(llm: LLM) -> list[int]:
    """Queue PROMPTS. Returns the request ids."""
    return [llm.add_request(*item) for item in zip(PROMPTS, PARAMS, strict=True)]


def run_steps(llm: LLM, max_steps: int = 1000) -> dict[int, list[int]]:
    """Step until nothing is left, or so often. Returns the tokens by request id."""
    outputs: dict[int, list[int]] = {}
    while max_steps and not llm.is_finished():
        max_steps -= 1
        for output in llm.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output["token_ids"]
        check_scheduler(llm.scheduler)
    return outputs


def run_until(error: type[BaseException], llm: LLM) -> dict[int, list[int]]:
    """Step until `error` is raised. Returns what `run_steps` does."""
    done: dict[int, list[int]] = {}
    with pytest.raises(error):
        while True:
            done.update(run_steps(llm, 1))
            assert not llm.is_finished(), f"no {error.__name__}"
    return done


def interrupt_after_launch(patch: pytest.MonkeyPatch, llm: LLM, k: int) -> dict[int, list[int]]:
    """Ctrl-C between the k-th launch of a step and its books. Returns what `run_steps` does."""
    finish, scope = llm.model_runner.finish, llm.core.reset_on_error
    calls, armed = itertools.count(1), []

    def launch(*args: Any) -> Any:
        armed.extend([True] * (next(calls) == k))
        return finish(*args)

    def enter() -> Any:
        if armed:
            raise KeyboardInterrupt
        return scope()

    with patch.context() as own:
        own.setattr(llm.model_runner, "finish", launch)
        own.setattr(llm.core, "reset_on_error", enter)
        return run_until(KeyboardInterrupt, llm)


def in_threads(num: int, work: Callable[[int], None]) -> None:
    """Call work(0), work(1), ... in threads that begin together. None may hang or raise."""
    errors: list[BaseException] = []
    start = threading.Barrier(num)

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not errors


def assert_idle(llm: LLM) -> None:
    """No request and no block is left, and the books are right."""
    check_scheduler(llm.scheduler)
    assert llm.is_finished()
    metrics = llm.metrics()
    left = {k: metrics[k] for k in ("num_used_kvcache_blocks", "num_waiting", "num_running")}
    assert not any(left.values()), left


def assert_usable(llm: LLM, path: Path) -> None:
    """Nothing is left, and the next `generate` returns its own, right results only."""
    assert_idle(llm)
    prompts = [PROMPT, PROMPT[::-1] * 5]
    outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert tokens(outputs) == [reference(path, p, 6) for p in prompts]
    assert_idle(llm)


def play(patch: pytest.MonkeyPatch, llm: LLM, scripts: list[list[int]]) -> None:
    """Let the model say this: one script for each completion from now on, then "#" for ever."""
    order: dict[int, int] = {}  # by the ids of sequences, which grow with arrival

    def scripted(scheduled: Any, newest: Any) -> PendingTokens:
        for seq in sorted((item.seq for item in scheduled), key=lambda seq: seq.seq_id):
            order.setdefault(seq.seq_id, len(order))
        said = [
            [*scripts[order[item.seq.seq_id]], *b"#" * 200][item.seq.num_completion_tokens]
            for item in scheduled
            if item.samples
        ]
        return PendingTokens(torch.tensor(said, dtype=torch.int32))

    patch.setattr(llm.executor, "run", scripted)


def gather(stream: Iterable[RequestOutput]) -> dict[int, list[tuple[Any, ...]]]:
    """The parts of a stream put together: for each request the `facts` of the whole."""
    parts: dict[int, dict[int, list[CompletionOutput]]] = {}
    ended = set()
    for output in stream:
        assert output.request_id not in ended, "news after the end"
        ended |= {output.request_id} if output.finished else set()
        assert (output.metrics is not None) is output.finished
        own = parts.setdefault(output.request_id, {})
        assert output.outputs, "no news"
        for new in output.outputs:
            news = own.setdefault(new.index, [])
            assert not news or news[-1].finish_reason is None, "news after the end"
            assert news or new.stop_reason is None or new.finish_reason
            assert new.token_ids, "no news"
            assert new.logprobs is None or len(new.logprobs) == len(new.token_ids)
            news.append(new)
        reasons = [news[-1].finish_reason for news in own.values()]
        assert not output.finished or all(reasons)
    assert ended == set(parts), "no end"
    return {i: [_joined(own[index]) for index in sorted(own)] for i, own in parts.items()}


def _joined(news: list[CompletionOutput]) -> tuple[Any, ...]:
    logprobs = None if news[0].logprobs is None else [p for new in news for p in new.logprobs or ()]
    whole = CompletionOutput(
        news[0].index,
        "".join(new.text for new in news),
        [token for new in news for token in new.token_ids],
        news[-1].finish_reason,
        news[-1].stop_reason,
        logprobs,
    )
    return facts(whole)


def facts(whole: CompletionOutput) -> tuple[Any, ...]:
    """A completion, so that those of streams and of `generate` can be compared."""
    logprobs = None if whole.logprobs is None else list(whole.logprobs)
    reasons = (whole.finish_reason, whole.stop_reason)
    return (whole.index, whole.text, whole.token_ids, *reasons, logprobs)


def outputs_of(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """The outputs of requests. The engine's books are right after each step."""
    ids = [llm.add_request(*request) for request in zip(prompts, params, strict=True)]
    found = {}
    while not llm.is_finished():
        found.update((output.request_id, output) for output in llm.step())
        check_scheduler(llm.scheduler)
    return [found[i] for i in ids]


def run_past_a_failure(llm: LLM) -> dict[int, Any]:
    """Step until nothing is left; one step raises RuntimeError. Returns outputs by request id."""
    found: dict[int, Any] = {}
    failures = 0
    while not llm.is_finished():
        try:
            found.update((output.request_id, output) for output in llm.step())
        except RuntimeError:
            failures += 1
        check_scheduler(llm.scheduler)
    assert failures == 1
    return found


def generate_checked(
    path: Any, prompts: Any, params: Any, **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """`outputs_of` and metrics of a SMALL engine with these options."""
    with LLM(path, **{**SMALL, **options}) as llm:
        return outputs_of(llm, prompts, params), llm.metrics()
