"""Modes of PyTorch that the caller has on: around the build, around calls, around both."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_reference import assert_greedy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints import PROMPT, SMALL, make_checkpoint, reference_logprobs
from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import Step

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(256) for _ in range(n)] for n in (5, 40, 100, 17)]  # one is in two steps
COUNT = 6
PARAMS = [
    {"temperature": 0.0},
    {"seed": 3},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"seed": 5, "n": 2, "allowed_token_ids": [*range(40, 90)]},
    {"seed": 7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "logprobs": 1},
    {
        **{"seed": 9, "top_p": 0.8, "logprob_token_ids": [3, 4], "return_sampling_mask": True},
        **{"logprobs_mode": "processed_logprobs"},
    },
]
OPTIONS = {**SMALL, "enable_prefix_caching": False}  # or what was cached would round otherwise

Call = Callable[[], Any]
Under = Callable[[Call], Any]


def within(mode: Callable[[], Any]) -> Under:
    """Calls in a mode that is a context manager."""

    def run(call: Call) -> Any:
        with mode():
            return call()

    return run


def inside(transform: Callable[..., Any], *more: Any) -> Under:
    """Calls in a transform of `torch.func`."""

    def run(call: Call) -> Any:
        found = []

        def function(x: torch.Tensor) -> torch.Tensor:
            found.append(call())
            return x.sum()

        x = torch.ones(3)
        transform(function, (x,), (x,)) if more else transform(function)(x)
        return found[0]

    return run


@contextlib.contextmanager
def setting(set_: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


class SeesFunctions(TorchFunctionMode):
    """Nothing of the engine's is to be seen: not all modes can do with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.device, f"seen: {func}"
        return func(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    """A dispatch mode that fails on any operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"seen: {func}")


MODES: dict[str, Under] = {
    "a device": within(lambda: torch.device("meta")),
    "the default device": within(lambda: setting(torch.set_default_device, "meta", None)),
    **{
        f"the default dtype {dtype}": within(
            lambda dtype=dtype: setting(torch.set_default_dtype, dtype, torch.float32)
        )
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    },
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "deterministic algorithms": within(
        lambda: setting(torch.use_deterministic_algorithms, True, False)
    ),
    "no gradients": within(torch.no_grad),
    "inference": within(torch.inference_mode),
    "anomalies": within(lambda: torch.autograd.set_detect_anomaly(True)),
    "saved tensors": within(lambda: torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse)),
    "forward gradients": within(torch.autograd.forward_ad.dual_level),
    "functions": within(SeesFunctions),
    "operators": within(SeesOperators),
    "fake tensors": within(FakeTensorMode),
    "vmap": inside(torch.func.vmap),
    "grad": inside(torch.func.grad),
    "jvp": inside(torch.func.jvp, "tangents"),
    "functionalize": inside(torch.func.functionalize),
}


def _refuse(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a graph is recorded")


def modes_on() -> tuple[Any, ...]:
    """Modes of the thread, and of the process."""
    level = torch._C._functorch.peek_interpreter_stack()
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch.autograd.forward_ad._current_level,
        [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())],
        torch._C._len_torch_dispatch_stack(),
        level and level.key(),
    )


def answers(llm: LLM) -> list[Any]:
    """All kinds of results."""
    params = [SamplingParams(max_tokens=COUNT, ignore_eos=True, **own) for own in PARAMS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    found: list[Any] = [each.to_dict() for each in llm.generate(prompts, params, use_tqdm=False)]
    for each in found:
        del each["request_id"], each["metrics"]
    for pooling in ("last", "mean"):
        vectors = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        found += [each.outputs.embedding for each in vectors]
    return found


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM, reference: Any) -> list[Any]:
    """Without a mode; that it is right is said elsewhere, and of one by transformers here, too."""
    found = answers(llm)
    plain = found[0]["outputs"][0]["token_ids"]
    prompt = PROMPTS[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *plain]])).logits[0]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == plain
    return found


@pytest.mark.parametrize("name", MODES)
def test_modes_of_the_caller_change_nothing(
    name: str, tiny: str, llm: LLM, expected: list[Any]
) -> None:
    """They are on as before after each call."""
    off = modes_on()

    def use() -> tuple[Any, ...]:
        on = modes_on()
        found = [answers(llm)]
        with LLM(tiny, **OPTIONS) as built:
            found += [answers(built)]
        return on, modes_on(), found

    on, behind, found = MODES[name](use)
    assert on != off and behind == on and modes_on() == off
    assert found == [expected, expected]


def test_an_engine_that_was_built_in_a_mode_is_used_without(tiny: str, expected: list[Any]) -> None:
    for name in ("a device", "the default dtype torch.float16", "autocast", "fake tensors"):
        with MODES[name](lambda: LLM(tiny, **OPTIONS)) as built:
            assert answers(built) == expected, name


def test_a_step_that_fails_leaves_the_modes_on(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, inputs: Any) -> None:
        raise RuntimeError("out of memory")

    with (
        torch.device("meta"),
        SeesFunctions(),
        torch.autocast("cpu", torch.bfloat16),
        FakeTensorMode(),
    ):
        on = modes_on()
        with monkeypatch.context() as patch:
            patch.setattr(Step, "run_model", fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                llm.generate(PROMPTS, use_tqdm=False)
        assert modes_on() == on
        assert answers(llm) == expected
        assert modes_on() == on


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 200,
    "short_factor": [1.0, 1.37, 2.11, 3.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 200,
            "rope_parameters": LONG,
        },
    ),
    "experts": ("mixtral", {"num_local_experts": 5}),
    "gemma": ("gemma3_text", {"head_dim": 32, "sliding_window": 20}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_default_dtype_is_that_of_no_table(name: str, tmp_path: Path) -> None:
    """Rotations in 16 bits were the right ones for the first positions only."""
    family, own = FAMILIES[name]
    path = make_checkpoint(tmp_path / "model", family, **own)
    prompt = [*PROMPT, *[(37 * i * i + i) % 127 for i in range(90)]]
    with (
        setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
        LLM(path, **SMALL) as built,
    ):
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        [output] = built.generate([prompt], params, use_tqdm=False)
    wanted = reference_logprobs(path, prompt)
    places = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    found = [place[token].logprob for token, place in places]
    right = wanted[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
    assert found == pytest.approx(right, abs=1e-3)


def test_ranks_meet_whatever_the_default_dtype_is_here(tiny: str, reference: Any) -> None:
    """The other processes have none of the caller's modes."""
    params = SamplingParams(temperature=0, max_tokens=COUNT)
    with (
        setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
        torch.device("meta"),
        LLM(tiny, tensor_parallel_size=2, **OPTIONS) as built,
    ):
        outputs = built.generate(PROMPTS, params, use_tqdm=False)
    assert_greedy(reference, PROMPTS, [each["token_ids"] for each in outputs], COUNT)
