"""Try everything that an install without extras offers. Needs nothing but the installed package:

    pip install . && python scripts/check_install.py

It goes through every field of `SamplingParams`, every public method of `LLM` and `AsyncLLM`, and a
checkpoint whose generation_config.json is that of a published Qwen3. A field or a method without a
trial here fails it, so that a new one cannot be forgotten.
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nanovllm import (
    LLM,
    TINY,
    AsyncLLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    share_weights,
)
from nanovllm.utils.options import Absent

PROMPT, ANSWER = "127+345=", "472"
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_kvcache_blocks": 64, "max_num_seqs": 16}
CAN_SLEEP = sys.platform == "linux"
# Contents of Qwen3's generation_config.json, with the tiny checkpoint's end-of-sequence tokens.
QWEN3_GENERATION = {
    "bos_token_id": 256,
    "do_sample": True,
    "eos_token_id": [258, 256],
    "pad_token_id": 256,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def text(output: RequestOutput) -> str:
    """Text of the first completion."""
    return output.outputs[0].text


def length(output: RequestOutput) -> int:
    """Tokens of the first completion."""
    return len(output.outputs[0].token_ids)


# Field -> parameters that use it (greedy where they do not say otherwise), and what must hold.
FIELDS: dict[str, tuple[dict[str, Any], Callable[[RequestOutput], bool]]] = {
    "temperature": ({"temperature": 1.0}, lambda o: length(o) > 0),
    "max_tokens": ({"max_tokens": 2}, lambda o: text(o) == ANSWER[:2]),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 9}, lambda o: length(o) == 9),
    "top_k": ({"temperature": 1.0, "top_k": 1}, lambda o: text(o) == ANSWER),
    "top_p": ({"temperature": 1.0, "top_p": 1e-6}, lambda o: text(o) == ANSWER),
    "min_p": ({"temperature": 1.0, "min_p": 1.0}, lambda o: text(o) == ANSWER),
    "repetition_penalty": ({"repetition_penalty": 1e9}, lambda o: "4" not in text(o)),
    "presence_penalty": ({"presence_penalty": 0.5}, lambda o: text(o) == ANSWER),
    "frequency_penalty": ({"frequency_penalty": 0.5}, lambda o: text(o) == ANSWER),
    "seed": ({"temperature": 1.0, "seed": 7}, lambda o: length(o) > 0),
    "n": ({"temperature": 1.0, "n": 3}, lambda o: len(o.outputs) == 3),
    "stop": ({"stop": ["7"]}, lambda o: text(o) == "4"),
    "stop_token_ids": ({"stop_token_ids": [ord("7")]}, lambda o: text(o) == "4"),
    "include_stop_str_in_output": (
        {"stop": ["7"], "include_stop_str_in_output": True},
        lambda o: text(o) == "47",
    ),
    "min_tokens": ({"min_tokens": 8}, lambda o: length(o) >= 8),
    "logprobs": ({"logprobs": 2}, lambda o: len(o.outputs[0].logprobs or ()) == length(o)),
    "logprobs_mode": (
        {"logprobs": 0, "logprobs_mode": "processed_logprobs", "top_k": 1, "temperature": 1.0},
        lambda o: abs(o.outputs[0].cumulative_logprob or 0.0) < 1e-6,
    ),
    "logprob_token_ids": (
        {"logprob_token_ids": [ord("4"), ord("5")], "max_tokens": 1},
        lambda o: [*(o.outputs[0].logprobs or [{}])[0]] == [ord("4"), ord("5")],
    ),
    "return_sampling_mask": (
        {"return_sampling_mask": True, "top_k": 1, "temperature": 1.0, "max_tokens": 1},
        lambda o: o.outputs[0].sampling_mask == [[ord("4")]],
    ),
    "prompt_logprobs": ({"prompt_logprobs": 0}, lambda o: len(o.prompt_logprobs or ()) == 8),
    "logit_bias": ({"logit_bias": {ord("9"): 1e6}, "max_tokens": 2}, lambda o: text(o) == "99"),
    "allowed_token_ids": ({"allowed_token_ids": [ord("2"), 258]}, lambda o: set(text(o)) <= {"2"}),
    "bad_words": ({"bad_words": ["4"]}, lambda o: "4" not in text(o)),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 9},
        lambda o: "<|" in text(o),
    ),
    "detokenize": ({"detokenize": False}, lambda o: text(o) == "" and length(o) > 0),
    "structured_outputs": ({}, lambda o: True),  # see structured_outputs()
}


def structured_outputs(llm: LLM) -> None:
    """Use structured outputs; without llguidance the error says what to install."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    if importlib.util.find_spec("llguidance") is not None:
        assert text(llm.generate(PROMPT, params, use_tqdm=False)[0]).isdigit()
        return
    message = "no error"
    try:
        llm.generate(PROMPT, params, use_tqdm=False)
    except ImportError as error:
        message = str(error)
    assert "pip install" in message, f"structured outputs without llguidance: {message}"


def fields(llm: LLM) -> None:
    """Every field of `SamplingParams`, alone and all of them in one batch."""
    missing = {field.name for field in dataclasses.fields(SamplingParams)} ^ set(FIELDS)
    assert not missing, f"fields of SamplingParams without a trial: {missing}"
    params = [SamplingParams(**{"temperature": 0.0, **given}) for given, _ in FIELDS.values()]
    together = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for (name, (_, holds)), own, param in zip(FIELDS.items(), together, params, strict=True):
        for output in (own, llm.generate(PROMPT, param, use_tqdm=False)[0]):
            assert holds(output), f"{name}: {output}"
    structured_outputs(llm)


def stepwise(llm: LLM) -> None:
    """The engine in the caller's hands: add_request, step, is_finished, abort, abort_all."""
    kept, dropped = (llm.add_request(PROMPT, SamplingParams(temperature=0)) for _ in range(2))
    assert llm.abort(dropped) and not llm.is_finished()
    outputs: list[RequestOutput] = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [(output.request_id, text(output)) for output in outputs] == [(kept, ANSWER)]
    llm.add_request(PROMPT)
    llm.abort_all()
    assert llm.is_finished()


def conversation(llm: LLM) -> None:
    """`chat`, by the checkpoint's template."""
    message = {"role": "user", "content": PROMPT}
    (output,) = llm.chat([message], SamplingParams(temperature=0), use_tqdm=False)
    assert text(output) == ANSWER


def streaming(llm: LLM) -> None:
    """`stream` gives the text in pieces."""
    pieces = [text(output) for output in llm.stream(PROMPT, SamplingParams(temperature=0))]
    assert "".join(pieces) == ANSWER and len(pieces) > 1


def likelihoods(llm: LLM) -> None:
    """`score`, `classify`, `embed` and `beam_search`."""
    right, wrong = llm.score([PROMPT + ANSWER, PROMPT + "111"], use_tqdm=False)
    assert right.total_logprob > wrong.total_logprob
    (judged,) = llm.classify(PROMPT, ["4", "5"], use_tqdm=False)
    assert judged.probs[0] > 0.9 and judged.share > 0.9
    (vector,) = llm.embed(PROMPT, use_tqdm=False)
    assert abs(sum(x * x for x in vector.outputs.embedding) - 1) < 1e-5
    (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))
    assert found.sequences[0].text.startswith(PROMPT + ANSWER)


def facts(llm: LLM) -> None:
    """Check the facts that an engine reports about itself."""
    assert llm.metrics()["num_finished"] > 0
    json.dumps(llm.metrics())
    assert llm.get_tokenizer().decode([ord("a")]) == "a"
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)
    llm.reset_prefix_cache()
    assert not llm.is_closed
    assert llm.llm_engine.get_tokenizer() is llm.get_tokenizer()
    assert not hasattr(llm, "get_metrics")  # whose error names metrics()


def timeline(llm: LLM) -> None:
    """A block that is recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with llm.trace(path):
            llm.generate(PROMPT, use_tqdm=False)
        names = {event["name"] for event in json.loads(path.read_text("utf-8"))}
    assert {"prefill", "decode", "request"} <= names, names


def refusals(llm: LLM) -> None:
    """One prompt that is refused, beside one that is not; and outputs as JSON."""
    outputs = llm.generate((p for p in (PROMPT, "x" * 999)), use_tqdm=False, on_error="return")
    assert [output.error is None for output in outputs] == [True, False]
    json.dumps([output.to_dict() for output in outputs])


def tensors() -> dict[str, torch.Tensor]:
    """The weights of the embedded checkpoint."""
    return load_file(Path(TINY) / "model.safetensors")


def adapter() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A LoRA adapter of one layer, which changes nothing: B is 0."""
    module = "model.layers.0.self_attn.q_proj"
    num_rows, num_cols = tensors()[f"{module}.weight"].shape
    parts = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(2, num_cols),
        f"base_model.model.{module}.lora_B.weight": torch.zeros(num_rows, 2),
    }
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, parts


def weights(llm: LLM) -> None:
    """New weights, which are the old ones, in three ways; an adapter; and sleep."""

    def answers() -> bool:
        return (
            text(llm.generate(PROMPT, SamplingParams(temperature=0), use_tqdm=False)[0]) == ANSWER
        )

    llm.update_weights(tensors(), version="new")
    assert llm.weight_version == llm.get_weight_version() == "new" and answers()
    if CAN_SLEEP:
        with share_weights(tensors()) as message:
            llm.update_weights_ipc(json.loads(json.dumps(message)))
        assert answers()
    llm.start_weight_update()
    for named in tensors().items():
        llm.update_weights([named])
    llm.finish_weight_update()
    assert answers()
    llm.load_adapter(adapter())
    assert llm.metrics()["adapter"] != "none" and answers()
    llm.unload_adapter()
    assert llm.metrics()["adapter"] == "none" and answers()
    if CAN_SLEEP:
        llm.sleep()
        assert llm.is_sleeping()
        llm.wake_up()
        assert not llm.is_sleeping() and answers()
    for name in absent(LLM):  # whose errors say what to do instead
        assert not hasattr(llm, name)


def absent(owner: type) -> set[str]:
    """The names of vLLM that an engine has not, and explains."""
    return {name for name in dir(owner) if isinstance(getattr(owner, name), Absent)}


def closing(llm: LLM) -> None:
    """`exit`, twice, and by vLLM's name."""
    llm.exit()
    llm.exit()
    llm.shutdown()
    assert llm.is_closed


# Checks of the public methods and properties; `closing` comes last.
METHODS: dict[Callable[[LLM], None], set[str]] = {
    fields: {"generate"},
    stepwise: {"add_request", "step", "is_finished", "abort", "abort_all"},
    conversation: {"chat"},
    streaming: {"stream"},
    likelihoods: {"score", "classify", "embed", "beam_search"},
    facts: {
        *("metrics", "get_tokenizer", "get_default_sampling_params", "reset_prefix_cache"),
        *("is_closed", "llm_engine", "get_metrics"),
    },
    timeline: {"trace"},
    refusals: set(),
    weights: {
        *("update_weights", "update_weights_ipc", "start_weight_update", "finish_weight_update"),
        *("weight_version", "get_weight_version", "load_adapter", "unload_adapter"),
        *("sleep", "wake_up", "is_sleeping", *absent(LLM)),
    },
    closing: {"exit", "shutdown"},
}


def asynchronous() -> None:
    """Every public method of `AsyncLLM`."""
    tried = {"generate", "stream", "get_tokenizer", "get_default_sampling_params"}
    tried |= {"metrics", "trace", "update_weights", "update_weights_ipc", "start_weight_update"}
    tried |= {"finish_weight_update", "get_weight_version", "load_adapter", "unload_adapter"}
    tried |= {"sleep", "wake_up", "is_sleeping", "render", "chat", "score", "embed"}
    tried |= {"check_health", "classify", "tokenize", *absent(AsyncLLM)}
    missing = public(AsyncLLM) ^ (tried | {"exit", "shutdown", "is_closed"})
    assert not missing, f"methods of AsyncLLM without a trial: {missing}"

    async def last_text(llm: AsyncLLM) -> str:
        return [text(o) async for o in llm.generate(PROMPT, SamplingParams(temperature=0))][-1]

    async def change(llm: AsyncLLM) -> None:
        await llm.update_weights(tensors(), version="new")
        assert await llm.get_weight_version() == "new"
        await llm.start_weight_update()
        await llm.update_weights(tensors())
        await llm.finish_weight_update()
        await llm.load_adapter(adapter())
        await llm.unload_adapter()
        for name in absent(AsyncLLM):
            assert not hasattr(llm, name)
        if CAN_SLEEP:
            with share_weights(tensors()) as message:
                await llm.update_weights_ipc(message)
            await llm.sleep()
            assert await llm.is_sleeping()
            await llm.wake_up()

    async def main() -> None:
        async with AsyncLLM(TINY, **OPTIONS, enable_sleep_mode=CAN_SLEEP) as llm:
            await change(llm)
            assert await asyncio.gather(*(last_text(llm) for _ in range(3))) == [ANSWER] * 3
            pieces = [text(o) async for o in llm.stream(PROMPT, SamplingParams(temperature=0))]
            assert "".join(pieces) == ANSWER
            ask = [{"role": "user", "content": PROMPT}]
            said = [text(o) async for o in llm.chat(ask, SamplingParams(temperature=0))]
            assert said[-1] == ANSWER and PROMPT in (await llm.render(ask))["prompt"]
            assert await llm.tokenize(PROMPT) == [*PROMPT.encode()]
            right, wrong = await asyncio.gather(*map(llm.score, (PROMPT + ANSWER, PROMPT + "111")))
            assert right.total_logprob > wrong.total_logprob
            assert (await llm.classify(PROMPT, ["4", "5"])).probs[0] > 0.9
            assert len((await llm.embed(PROMPT)).outputs.embedding) > 1
            await llm.check_health()
            with tempfile.TemporaryDirectory() as folder:
                async with llm.trace(path := Path(folder) / "trace.json"):
                    assert await last_text(llm) == ANSWER
                assert json.loads(path.read_text("utf-8"))
            assert (await llm.metrics())["num_finished"] == 10
            assert (await llm.get_tokenizer()).decode([ord("a")]) == "a"
            assert isinstance(llm.get_default_sampling_params(), SamplingParams)
        llm.exit()
        llm.shutdown()
        assert llm.is_closed

    asyncio.run(main())


def published_checkpoint() -> None:
    """`generate` without parameters takes those of the checkpoint: top_k and top_p, too."""
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copytree(TINY, Path(folder) / "model")
        (path / "generation_config.json").write_text(json.dumps(QWEN3_GENERATION))
        with LLM(path, **OPTIONS) as llm:
            params = llm.get_default_sampling_params()
            assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
            assert text(llm.generate(PROMPT, use_tqdm=False)[0]) == ANSWER


def public(owner: type) -> set[str]:
    """The names that are not private."""
    return {name for name in dir(owner) if not name.startswith("_")}


def main() -> None:
    """Try everything, and say how much that was."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    tried = set().union(*METHODS.values())
    assert tried == public(LLM), f"methods of LLM without a trial: {tried ^ public(LLM)}"
    llm = LLM(TINY, **OPTIONS, enable_sleep_mode=CAN_SLEEP)
    for trial in METHODS:
        trial(llm)
    asynchronous()
    published_checkpoint()
    extras = [name for name in ("llguidance", "flash_attn") if importlib.util.find_spec(name)]
    print(
        f"{len(FIELDS)} fields and {len(tried)} methods work in Python {sys.version.split()[0]}, "
        f"with the extras: {', '.join(extras) or 'none'}"
    )


if __name__ == "__main__":
    main()
