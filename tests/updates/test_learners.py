"""What a learner's process does to an engine amid an update, and the tensors of a peft model."""

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from new_weights import PARAMS, PROMPTS, results, two_checkpoints
from safetensors.torch import load_file

from checkpoints import SMALL, greedy
from nanovllm import LLM, AsyncLLM
from nanovllm.updates.hold import Hold
from nanovllm.updates.memory import RankMemory

OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64}
PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    return two_checkpoints(tmp_path_factory.mktemp("learners"))


class Panic(BaseException):
    """As extensions in Rust raise."""


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Panic("torn"), StopIteration()],
    ids=repr,
)
def test_async_survives_all_that_tensors_raise(
    error: BaseException, paths: tuple[Path, Path]
) -> None:
    """The engine's thread ended, and all who waited did for ever."""

    class Torn(dict[str, Any]):
        def items(self) -> Any:
            raise error

    async def run() -> None:
        async with AsyncLLM(paths[0], **OPTIONS) as llm:
            outputs = llm.generate(PROMPTS[0], greedy(60))
            await anext(outputs)
            for call in (llm.update_weights(Torn()), llm.load_adapter(({"r": 1}, Torn()))):
                with pytest.raises(RuntimeError, match=type(error).__name__):
                    await call
            last = [output async for output in outputs][-1]
            assert last.finished and len(last.outputs[0].token_ids) == 60
            await llm.update_weights(load_file(paths[1] / "model.safetensors"))
            assert await llm.get_weight_version() == 1

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_panic_in_a_step_ends_its_requests(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with AsyncLLM(paths[0], **OPTIONS) as llm:
            with monkeypatch.context() as patch:

                def step(_: LLM) -> None:
                    raise Panic("torn")

                patch.setattr(LLM, "step", step)
                with pytest.raises(RuntimeError, match=r"the engine has failed \(Panic: torn\)"):
                    await anext(llm.generate(PROMPTS[0], greedy(2)))
            last = [output async for output in llm.generate(PROMPTS[0], greedy(2))][-1]
            assert last.finished

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("use", ["update_weights", "start_weight_update", "unload_adapter"])
def test_ctrl_c_as_an_update_begins(
    use: str, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left an engine that waited for the end of a call that had ended."""
    new = load_file(paths[1] / "model.safetensors")
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        give_up = RankMemory.give_up_update

        def interrupted(memory: RankMemory) -> None:
            signal.raise_signal(signal.SIGINT)
            give_up(memory)

        calls = {"update_weights": lambda: llm.update_weights(new)}
        with monkeypatch.context() as patch:
            patch.setattr(RankMemory, "give_up_update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                calls.get(use, getattr(llm, use))()
        if use == "update_weights":
            llm.reset_prefix_cache()
            assert results(llm) == before
        elif use == "start_weight_update":
            with pytest.raises(RuntimeError, match=r"end that with finish_weight_update\(\)"):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            llm.update_weights(new)
            llm.finish_weight_update()
        else:
            with pytest.raises(RuntimeError, match="update all of them again"):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            llm.unload_adapter()
            assert results(llm) == before
        llm.update_weights(new)
        assert results(llm) != before


def test_ctrl_c_as_an_update_ends(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left an engine that told its caller to wait for a call that had ended."""
    with LLM(paths[1], **OPTIONS) as fresh:
        wanted = results(fresh)
    drop = Hold.drop

    def interrupted(hold: Hold, name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        drop(hold, name)

    with LLM(paths[0], **OPTIONS) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Hold, "drop", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.update_weights(load_file(paths[1] / "model.safetensors"))
        assert llm.weight_version == 1
        assert results(llm) == wanted


def test_ctrl_c_amid_an_update(paths: tuple[Path, Path]) -> None:
    def tensors() -> Iterator[Any]:
        yield from [*load_file(paths[1] / "model.safetensors").items()][:3]
        signal.raise_signal(signal.SIGINT)

    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(tensors())
        with pytest.raises(RuntimeError, match="an update was interrupted: update all of them"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.unload_adapter()
        assert results(llm) == before


def test_exit_of_the_process_amid_an_update(paths: tuple[Path, Path]) -> None:
    """In an LLM it is the caller's own, and the engine is told."""

    def tensors() -> Iterator[Any]:
        yield from [*load_file(paths[1] / "model.safetensors").items()][:3]
        sys.exit(4)

    with LLM(paths[0], **OPTIONS) as llm:
        with pytest.raises(SystemExit):
            llm.update_weights(tensors())
        with pytest.raises(RuntimeError, match=r"an update has failed \(SystemExit: 4\)"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}])
def test_merged_tensors_of_a_peft_model(
    more: dict[str, Any], paths: tuple[Path, Path], tmp_path: Path
) -> None:
    """The page's function against peft's merge and a checkpoint of the result."""
    [block] = re.findall(
        r"^```python title=\"Needs peft.*?\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, str(PAGE), "exec"), names)
    base = transformers.AutoModelForCausalLM.from_pretrained(paths[0])
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **more)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(61)
    for param in model.parameters():
        if param.requires_grad:
            param.data.add_(0.1 * torch.randn(param.shape, generator=generator))
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        names["update"](llm, model)
        found = results(llm)
        for name, tensor in model.state_dict().items():
            assert (tensor - own[name]).abs().max() < 1e-6, f"{name} is the learner's"
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    with LLM(tmp_path / "merged", **OPTIONS) as fresh:
        wanted = results(fresh)
    assert found[0] == wanted[0] and found != before
    for one, other in zip(found[-3:], wanted[-3:], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
