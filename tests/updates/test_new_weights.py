"""Weights that are replaced: bit for bit those of an engine that is built with the new ones.

The families have the same test in `tests/model`.
"""

import asyncio
import gc
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fp8_checkpoints
import int4_checkpoints
import mxfp4_checkpoints
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from new_weights import (
    PARAMS,
    PROMPTS,
    assert_weights_change,
    results,
    two_checkpoints,
    with_other_values,
)
from peft_adapters import make_adapter
from ranks_in_threads import ThreadedExecutor
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from checkpoints import SMALL, greedy, make_checkpoint, rare, tokens
from nanovllm import LLM, AsyncLLM, SamplingParams, share_weights
from nanovllm.engine import llm_engine
from nanovllm.layers.weights import onednn
from nanovllm.updates import parcel

OPTIONS = {**SMALL, "num_kvcache_blocks": 64}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    return two_checkpoints(tmp_path_factory.mktemp("weights"))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


# -- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, rare(2)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.usefixtures("threads")
def test_layouts_that_are_made_after_loading(
    quantization: str | None,
    tied: bool,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN's own, of numbers and of what FP8 leaves of them; the embedding of a tied head is
    beside it.
    """
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    other = with_other_values(path, tmp_path / "other")
    assert_weights_change(path, other, quantization=quantization, tensor_parallel_size=size)


@pytest.mark.parametrize("way", ["blocks", *map(rare, list(fp8_checkpoints.WAYS)[1:])])
def test_codes_in_8_bits(way: str, tmp_path: Path) -> None:
    path, _ = fp8_checkpoints.checkpoints(tmp_path, way)
    assert_weights_change(path, with_other_values(path, tmp_path / "other"))
    assert_plain_weights_are_refused(path, "model.layers.0.mlp.down_proj.weight")


def assert_plain_weights_are_refused(path: Path, weight: str) -> None:
    """With the remedy, and before anything is written."""
    with LLM(path, **OPTIONS) as llm:
        misspelt = {"model.layers.0.input_norm.weight": torch.zeros(64)}
        with pytest.raises(ValueError, match="by the names that the checkpoint has for them"):
            llm.update_weights(misspelt)
        for tensors in ({weight: torch.zeros(64, 96)}, iter([(weight, torch.zeros(64, 96))])):
            with pytest.raises(
                ValueError, match="checkpoint is quantised: pass tensors of its own"
            ):
                llm.update_weights(tensors)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, rare(2)])
def test_codes_of_experts_in_4_bits(size: int, tmp_path: Path) -> None:
    """MXFP4, with the scales of other blocks."""
    path, _ = mxfp4_checkpoints.checkpoints(tmp_path)
    tensors = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")
    other = with_other_values(path, tmp_path / "other")
    assert_weights_change(path, other, tensor_parallel_size=size)
    assert_plain_weights_are_refused(path, "model.layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize("way", ["awq", *map(rare, list(int4_checkpoints.WAYS)[1:])])
def test_codes_in_4_bits(way: str, tmp_path: Path) -> None:
    path, _ = int4_checkpoints.checkpoints(tmp_path, way)
    assert_weights_change(path, with_other_values(path, tmp_path / "other", "g_idx", "shape"))
    assert_plain_weights_are_refused(path, "model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("size", [1, 2])
def test_values_that_contradict_the_model_are_found_as_they_come(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_engine, "Executor", ThreadedExecutor)
    path, _ = int4_checkpoints.checkpoints(tmp_path, "gptq")
    tensors = tensors_of(path)
    name = "model.layers.0.self_attn.q_proj.bias"
    wrong = {**tensors, name: tensors[name] + 1}
    with LLM(path, **OPTIONS, tensor_parallel_size=size) as llm:
        before = results(llm)
        for given in (wrong, iter(wrong.items())):
            with pytest.raises(ValueError, match=f"{name} has values other than 0"):
                llm.update_weights(given)
            if given is wrong:
                assert results(llm) == before
        with pytest.raises(RuntimeError, match="has values other than 0"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.update_weights(iter(tensors.items()))
        assert results(llm) == before


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, rare({"data_parallel_size": 2})])
def test_weights_of_other_processes(options: dict[str, int], paths: tuple[Path, Path]) -> None:
    assert_weights_change(*paths, **options)


def results_after(llm: LLM, path: Path) -> list[Any]:
    """Results of an engine with the weights of `path`: those of a fresh one, as is seen above."""
    llm.update_weights(tensors_of(path))
    return results(llm)


# -- doors -----------------------------------------------------------------------------------------


def test_an_update_leaves_no_new_objects(paths: tuple[Path, Path]) -> None:
    """Else Python soon searches the whole process for cycles, which takes a tenth of a second."""
    new = tensors_of(paths[1])
    with LLM(str(paths[0]), **{**OPTIONS, "num_kvcache_blocks": 4096}) as llm:
        llm.generate(PROMPTS, use_tqdm=False)
        llm.update_weights(new)
        gc.collect()
        gc.freeze()
        try:
            llm.update_weights(new)
            left = len(gc.get_objects())
        finally:
            gc.unfreeze()
        assert left < 100


def test_several_calls_and_versions(paths: tuple[Path, Path]) -> None:
    """vLLM's names."""
    old, new = map(tensors_of, paths)
    names = list(new)
    with LLM(paths[1], **OPTIONS) as fresh:
        wanted = results(fresh)
    with LLM(paths[0], **OPTIONS) as llm:
        assert llm.weight_version == llm.get_weight_version() == 0
        llm.start_weight_update()
        llm.update_weights({name: old[name] for name in names[:3]})
        llm.start_weight_update()  # those are forgotten
        for name in names[:-1]:
            llm.update_weights([(name, new[name])])
        with pytest.raises(ValueError, match=f"missing from the update: {names[-1]}"):
            llm.finish_weight_update()
        for use in (lambda: llm.generate(PROMPTS), lambda: llm.embed(PROMPTS), llm.step):
            with pytest.raises(RuntimeError, match=r"end that with finish_weight_update\(\)"):
                use()
        with pytest.raises(ValueError, match="which takes it, got 7"):
            llm.update_weights({names[-1]: new[names[-1]]}, version=7)
        llm.update_weights({names[-1]: new[names[-1]]})
        llm.finish_weight_update(weight_version="step 12")
        assert llm.weight_version == "step 12"
        assert results(llm) == wanted
        [output] = llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
        assert output.weight_version == "step 12"
        llm.update_weights(old)
        assert llm.weight_version == 2
        with pytest.raises(RuntimeError, match=r"call start_weight_update\(\)"):
            llm.finish_weight_update()


SENDER = """
import json, sys
from safetensors.torch import load_file
from nanovllm import share_weights

tensors = load_file(sys.argv[1])
names = list(tensors)
for some in (names, names[:4], names[4:]):
    with share_weights({name: tensors[name] for name in some}) as message:
        print(json.dumps(message), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "options", [{}, rare({"tensor_parallel_size": 2}), rare({"data_parallel_size": 2})]
)
def test_tensors_of_another_process(options: dict[str, int], paths: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", SENDER, str(paths[1] / "model.safetensors")]
    with (
        LLM(paths[0], **OPTIONS, **options) as llm,
        subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as sender,
    ):
        assert sender.stdin is not None and sender.stdout is not None
        told, go_on = sender.stdout, partial(print, file=sender.stdin, flush=True)
        old, wanted = results(llm), results_after(llm, paths[1])
        llm.update_weights(tensors_of(paths[0]))
        whole = json.loads(told.readline())
        llm.update_weights_ipc(whole, version=5)
        assert results(llm) == wanted and llm.weight_version == 5
        llm.update_weights(tensors_of(paths[0]))
        assert results(llm) == old
        go_on()
        part = json.loads(told.readline())
        with pytest.raises(ValueError, match="missing from the update: "):
            llm.update_weights_ipc(part)
        with pytest.raises(RuntimeError, match="must not have ended the sharing"):
            llm.update_weights_ipc(whole)
        llm.update_weights(tensors_of(paths[0]))
        llm.start_weight_update()
        with pytest.raises(ValueError, match="`version` must be None between start_weight_update"):
            llm.update_weights_ipc(part, version=7)
        llm.update_weights_ipc(part)
        go_on()
        llm.update_weights_ipc(json.loads(told.readline()))
        llm.finish_weight_update()
        assert results(llm) == wanted and llm.weight_version == 8
        go_on()


def test_a_buffer_on_a_gpu_is_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process maps these in half a millisecond, and any other size in 9 ms a GB."""
    sizes = []
    monkeypatch.setattr(parcel.driver, "allocate", lambda num_bytes, _: sizes.append(num_bytes))
    monkeypatch.setattr(parcel.driver, "export", lambda *_: bytes(64))
    monkeypatch.setattr(parcel.driver, "as_tensor", lambda *_: torch.empty(0))
    monkeypatch.setattr(parcel, "wait_for_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for num_bytes in (256, 2 << 20, (4 << 20) + 256):
        parcel.Buffer(num_bytes, torch.device("cuda"))
    assert sizes == [2 << 20, 2 << 20, 6 << 20]


def test_messages_that_are_none(paths: tuple[Path, Path]) -> None:
    tensors = tensors_of(paths[1])
    with LLM(paths[0], **OPTIONS) as llm, share_weights(tensors) as message:
        before = results(llm)
        for changes, error in (
            ({"offsets": [-1] * len(tensors)}, "its tensors would not begin at"),
            ({"offsets": [0] * len(tensors)}, "its tensors would not begin"),  # they overlap
            ({"offsets": [n / 1 for n in message["offsets"]]}, "0.0 is no int"),
            ({"num_bytes": 256}, "is not inside the buffer"),
            ({"num_bytes": float("inf")}, "inf is no int"),
            ({"num_bytes": True}, "True is no int"),
            ({"dtypes": ["float"] * len(tensors)}, "float"),
            ({"shapes": ["64"] * len(tensors)}, "'64' is no list"),
            ({"shapes": [["6", "4"]] * len(tensors)}, "'6' is no int"),
            ({"shapes": [[-64]] * len(tensors)}, r"of the shape \[-64\]"),
            ({"names": "a" * len(tensors)}, "is no list"),
            ({"names": [], "shapes": [], "dtypes": [], "offsets": []}, "begin at"),
            ({"names": []}, "shorter|longer"),
            ({"memory": {"handle": "00"}}, "a handle has 64 bytes, got 1"),
            ({"memory": {"handle": 0}}, "0 is no str"),
            ({"memory": {}}, "its memory is {}"),
            ({"memory": None}, "its memory is None"),
            ({"memory": {**message["memory"], "pid": 1.5}}, "1.5 is no int"),
        ):
            with pytest.raises(ValueError, match=rf"in the other process, unchanged \(.*{error}"):
                llm.update_weights_ipc({**message, **changes})
        for changes, error in (
            ({"memory": {"handle": "00" * 64}}, "share tensors on the CPU"),
            ({"num_bytes": 2 * message["num_bytes"]}, "has fewer than"),
            ({"memory": {**message["memory"], "inode": 1}}, "must not have ended the sharing"),
        ):
            with pytest.raises(RuntimeError, match=error):
                llm.update_weights_ipc({**message, **changes})
            assert results(llm) == before, "nothing has been written"
        with pytest.raises(TypeError, match=r"what share_weights\(\) has given"):
            llm.update_weights_ipc({"names": [], 0: []})
        for wrong, error in (
            (json.dumps(message), r"read it by json\.loads\(\)"),
            (share_weights(tensors), "share by `with share_weights"),
        ):
            with pytest.raises(TypeError, match=error):
                llm.update_weights_ipc(wrong)  # type: ignore[arg-type]
        llm.reset_prefix_cache()
        assert results(llm) == before and llm.weight_version == 0


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_cannot_be_shared_are_named() -> None:
    codes = torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8)
    for tensor, error in (
        (torch.empty(1, device="meta"), "has no values: it is on the device meta"),
        (torch.ones(1).to_sparse(), r"has the layout torch.sparse_coo: pass tensor.to_dense\(\)"),
        (codes, r"is torch.qint8: pass tensor.dequantize\(\)"),
        (torch.ones(1, dtype=torch.complex64), "is torch.complex64, but must be one of torch.fl"),
        (torch.ones(1, dtype=torch.uint16), "is torch.uint16, but must be one of torch.float64"),
    ):
        with pytest.raises(ValueError, match=f"tensor a {error}"), share_weights({"a": tensor}):
            pass
    with pytest.raises(ValueError, match="got no tensors"), share_weights({}):
        pass


@pytest.mark.parametrize(
    ("options", "overlap"), [({}, False), ({}, True), rare({"data_parallel_size": 2}, True)]
)
def test_requests_that_run_go_on_by_the_new_weights(
    options: dict[str, int], overlap: bool, paths: tuple[Path, Path]
) -> None:
    """Each continues its own tokens as an engine of the new weights would, and is told so."""
    options = {**OPTIONS, "overlap": overlap, **options}
    rng = random.Random(7)
    prompts = [[rng.randrange(127) for _ in range(n)] for n in (5, 33, 17, 40)]

    async def run() -> list[Any]:
        async with AsyncLLM(paths[0], **options) as llm:
            begun, halted = asyncio.Event(), []

            async def complete(prompt: list[int]) -> Any:
                outputs = []
                async for output in llm.generate(prompt, greedy(60)):
                    outputs.append((output.outputs[0].token_ids, output.weight_version))
                    if len(outputs[-1][0]) >= 3:
                        halted.append(prompt)
                        begun.set()
                return outputs

            tasks = [asyncio.create_task(complete(prompt)) for prompt in prompts]
            await begun.wait()
            await llm.update_weights(tensors_of(paths[1]), version=9)
            assert await llm.get_weight_version() == 9
            return await asyncio.gather(*tasks)

    histories = asyncio.run(run())
    num_by_both = 0
    with LLM(paths[0], **OPTIONS) as old, LLM(paths[1], **OPTIONS) as fresh:
        by_old = tokens(old.generate(prompts, greedy(60), use_tqdm=False))
        for prompt, history, olds in zip(prompts, histories, by_old, strict=True):
            before = [found for found, version in history if version == 0]
            own = before[-1] if before else []
            num_by_both += 0 < len(own) < 60
            whole, version = history[-1]
            assert version == 9 and len(whole) == 60 and whole[: len(own)] == own
            # Steps in flight, or whose news was not read yet, may have added tokens by old weights.
            most = next((i for i in range(60) if whole[i] != olds[i]), 59)
            numbers = range(len(own), most + 1)
            assert numbers, "it has gone on by other weights than the old ones"
            rests = fresh.generate(
                [prompt + whole[:n] for n in numbers],
                [greedy(60 - n) for n in numbers],
                use_tqdm=False,
            )
            assert any(
                whole[n:] == rest["token_ids"] for n, rest in zip(numbers, rests, strict=True)
            )
    assert num_by_both > 0


def test_prompt_logprobs_are_of_one_version(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights change when a part of the prompt has been computed."""
    monkeypatch.setattr(LLM, "_begins_again", True)  # as in `AsyncLLM`
    prompt = random.Random(3).choices(range(128), k=100)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    options = {**OPTIONS, "max_num_batched_tokens": 32}
    with LLM(paths[1], **options) as fresh:
        [wanted] = fresh.generate([prompt], params, use_tqdm=False)
    with LLM(paths[0], **options) as llm:
        llm.add_request(prompt, params)
        llm.step()
        llm.step()
        assert 0 < llm.scheduler.running[0].num_computed_tokens < 100
        llm.update_weights(tensors_of(paths[1]))
        outputs: list[Any] = []
        while not outputs:
            outputs = llm.step()
    [output] = outputs
    assert output.prompt_logprobs == wanted.prompt_logprobs
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_async_holds_between_the_calls_of_an_update(paths: tuple[Path, Path]) -> None:
    async def run() -> None:
        async with AsyncLLM(paths[0], **OPTIONS) as llm:
            outputs = llm.generate(PROMPTS[0], greedy(60))
            await anext(outputs)
            await llm.start_weight_update()
            with pytest.raises(RuntimeError, match="end that with finish_weight_update"):
                await anext(llm.generate(PROMPTS[0], greedy(2)))
            metrics = await llm.metrics()
            await llm.update_weights(tensors_of(paths[1]))
            assert (await llm.metrics())["num_steps"] == metrics["num_steps"], "it has gone on"
            twice = pytest.raises(ValueError, match="comes twice in one update")
            with share_weights(tensors_of(paths[0])) as message, twice:
                await llm.update_weights_ipc(message)
            await llm.finish_weight_update()
            last = [output async for output in outputs][-1]
            assert last.finished and last.weight_version == 1

    asyncio.run(run())


# -- mistakes --------------------------------------------------------------------------------------

NORM = "model.norm.weight"
WRAPPED = (
    "module.model.norm.weight",
    "_orig_mod.model.norm.weight",
    "model.layers.0._orig_mod.input_layernorm.weight",
)
PEFTS = "base_model.model.model.norm.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"


async def one_by_one(new: dict[str, torch.Tensor]) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for item in new.items():
        yield item


def test_what_is_wrong_is_named_before_anything_is_written(paths: tuple[Path, Path]) -> None:
    new = tensors_of(paths[1])
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        some = {name: tensor for name, tensor in new.items() if name != NORM}
        wrong: list[tuple[Any, str]] = [
            (some, f"missing from the update: {NORM}"),
            (new | {"model.layer.weight": new[NORM]}, "the model has no tensor model.layer.weight"),
            (
                new | {NORM: new[NORM][:-1]},
                rf"{NORM} has shape \[63\], but the model implies \[64\]",
            ),
            (new | {NORM: new[NORM].long()}, f"{NORM} is I64, but the model implies F64 or F32"),
            ([*new.items(), (NORM, new[NORM])], f"{NORM} comes twice in one update"),
            (new | {NORM: new[NORM].to("meta")}, f"{NORM} has no values: it is on the device meta"),
            (new | {NORM: new[NORM].to_sparse()}, f"{NORM} has the layout torch.sparse_coo"),
            (
                iter(({"x": new[NORM]}).items()),
                "the model has no tensor x: pass the tensors by the",
            ),
            *(({name: new[NORM]}, "merged tensors by the base model's names") for name in PEFTS),
            *(({name: new[NORM]}, "inside the wrapper") for name in WRAPPED),
            ((some | {"x": new[NORM]}).items(), "the model has no tensor x"),
            (iter(()), r"no tensor of the model has come \(a generator can be read once\)"),
            ({}, "no tensor of the model has come"),
            (new | {NORM: new[NORM][:0]}, f"{NORM} has no values, as ZeRO-3 .*: gather it first"),
        ]
        for tensors, error in wrong:
            with pytest.raises(ValueError, match=error):
                llm.update_weights(tensors)
            assert llm.weight_version == 0
        for tensors, error in (
            ([NORM], "got str$"),
            ({NORM: [1.0]}, f"got '{NORM}' and list$"),
            ([(new[NORM], NORM)], "got Tensor and str$"),
            ([(NORM, new[NORM], 1)], "got tuple of 3 values$"),
            ([[new[NORM]]], "got list of 1 values$"),
            ({"update_info": {}}, "the tensors themselves"),
            (None, "got NoneType$"),
            ({NORM: new[NORM].numpy()}, r"and ndarray: pass torch.from_numpy\(array\)$"),
            (one_by_one(new), r"pass \[pair async for pair in tensors\]$"),
            ({"memory": {}}, r"pass a message of share_weights\(\) to update_weights_ipc\(\)$"),
        ):
            with pytest.raises(TypeError, match=f"`tensors` must be.*{error}"):
                llm.update_weights(tensors)
        with pytest.raises(TypeError, match=r"pass model.state_dict\(\)"):
            llm.update_weights(torch.nn.Sequential())
        with pytest.raises(TypeError, match=r"`version` must be an integer or a string, got 0\.5"):
            llm.update_weights(new, version=0.5)
        assert results(llm) == before
        llm.add_request(PROMPTS[0])
        for use in (lambda: llm.update_weights(new), llm.start_weight_update):
            with pytest.raises(
                RuntimeError, match="weights and memory cannot change while requests are left"
            ):
                use()
        llm.abort_all()
        llm.update_weights(new)


def test_what_is_wrong_with_stacked_experts_is_named(tmp_path: Path) -> None:
    """By the names that a model of transformers has for them."""
    path = make_checkpoint(tmp_path / "model", "mixtral", num_local_experts=3)
    new = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    module = "model.layers.1.block_sparse_moe"
    both, router = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight"
    one = f"{module}.experts.2.w3.weight"
    single = {one: new[both][2, 96:]}
    shape = r"but the model implies \[3, 192, 64\]"
    wrong: list[tuple[Any, str]] = [
        (new | {both: new[both][:2]}, rf"{both} has shape \[2, 192, 64\], {shape}"),
        (new | {both: new[both][:, 1:]}, rf"{both} has shape \[3, 191, 64\], {shape}"),
        (new | {both: new[both].mT}, rf"{both} has shape \[3, 64, 192\], {shape}"),
        (new | {both: new[both].long()}, f"{both} is I64, but the model implies F64"),
        (new | {router: new[router][1:]}, rf"{router} has shape \[2, 64\]"),
        ([*new.items(), (both, new[both])], f"{both} comes twice in one update"),
        ([*single.items(), *new.items()], f"{both} comes twice in one update"),
        ([*new.items(), *single.items()], f"{one} comes twice in one update"),
        (
            {name: tensor for name, tensor in new.items() if name != both},
            f"missing from the update: {module}.experts.0.w1.weight, {module}.experts.0.w3.weight",
        ),
        (new | {f"{both}_bias": new[both]}, f"the model has no tensor {both}_bias"),
    ]
    with LLM(path, **OPTIONS) as llm:
        before = results(llm)
        for tensors, error in wrong:
            with pytest.raises(ValueError, match=error):
                llm.update_weights(tensors)
        with share_weights({both: new[both]}) as message:
            llm.start_weight_update()
            llm.update_weights(single)
            with pytest.raises(ValueError, match=f"{both} comes twice in one update"):
                llm.update_weights_ipc(message)
            with pytest.raises(ValueError, match=f"{both} comes twice in one update"):
                llm.update_weights(iter([(both, new[both])]))
            rest = [
                f"{module}.experts.{i}.{part}.weight" for i in (0, 1, 2) for part in ("w1", "w3")
            ]
            rows = [rows for each in new[both] for rows in each.chunk(2)]
            some = dict(zip(rest, rows, strict=True))
            llm.update_weights({name: some[name] for name in rest[:-1]})
            llm.update_weights({name: tensor for name, tensor in new.items() if name != both})
            llm.finish_weight_update()
        assert results(llm) == before


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP1 leaves parameters between steps."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wrap", "error"),
    [
        (lambda x, mesh: distribute_tensor(x, mesh, [Replicate()]), r"DTensor: .*full_tensor\(\)"),
        (
            lambda x, _: AsyncCollectiveTensor(x),
            "is of the type AsyncCollectiveTensor: pass a plain tensor",
        ),
        (lambda x, _: TwoTensor(x, x), "is of the type TwoTensor: pass a plain tensor"),
        (
            lambda x, _: torch.nn.Parameter(TwoTensor(x, x)),
            "is of the type TwoTensor: pass a plain tensor",
        ),
        (lambda x, _: fake(x), "is of the type FakeTensor: pass a plain tensor"),
        (lambda x, _: freed(x), "has no values: its memory is freed.*gather it first"),
    ],
    ids=["dtensor", "collective", "two", "parameter", "fake", "freed"],
)
def test_tensors_whose_memory_is_elsewhere_are_refused(
    wrap: Any, error: str, mesh: DeviceMesh, paths: tuple[Path, Path]
) -> None:
    """The process died of some of them."""
    name = "model.layers.0.self_attn.q_proj.weight"
    new = tensors_of(paths[1])
    wrong = new | {name: wrap(new[name], mesh)}
    pefts = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    adapter = {"peft_type": "LORA", "r": 64}, {pefts: wrong[name]}
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        for given in (wrong, list(wrong.items()), iter([(name, wrong[name])])):
            with pytest.raises(ValueError, match=f"tensor {name} .*{error}"):
                llm.update_weights(given)
        with pytest.raises(ValueError, match=f"tensor {name} .*{error}"), share_weights(wrong):
            pass
        with pytest.raises(ValueError, match=f"tensor {pefts} .*{error}"):
            llm.load_adapter(adapter)
        llm.reset_prefix_cache()
        assert results(llm) == before and llm.weight_version == 0


@torch.no_grad()
def test_plain_tensors_of_all_kinds(paths: tuple[Path, Path]) -> None:
    """Parameters, views, inference tensors; and those of `torch.func`, which have no storage."""
    name = "model.norm.weight"
    new = tensors_of(paths[1])
    with torch.inference_mode():
        inference = new[name].clone()
    kinds = [
        torch.nn.Parameter(new[name]),
        torch.stack([new[name]] * 2, 1)[:, 0],
        torch._neg_view(-new[name]),
        (torch.zeros_like(new[name]) - 1j * new[name]).conj().imag,
        inference,
    ]
    with LLM(paths[0], **OPTIONS) as llm:
        wanted = results_after(llm, paths[1])
        for kind in kinds:
            llm.update_weights(tensors_of(paths[0]))
            llm.update_weights(new | {name: kind})
            assert results(llm) == wanted

        def learn(norm: torch.Tensor) -> torch.Tensor:
            llm.update_weights(new | {name: norm})
            return norm.sum()

        llm.update_weights(tensors_of(paths[0]))
        torch.func.grad(learn)(new[name])
        assert results(llm) == wanted


def test_tensors_that_use_the_engine_are_told_that_it_is_busy(paths: tuple[Path, Path]) -> None:
    with LLM(paths[0], **OPTIONS) as llm:

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            yield from tensors_of(paths[1]).items()

        with pytest.raises(RuntimeError, match="until the call that does it has returned"):
            llm.update_weights(tensors())
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_tensors_that_change_the_weights_are_told_that_it_is_busy(
    paths: tuple[Path, Path],
) -> None:
    """The update inside ended well, and that outside had never begun."""
    new = tensors_of(paths[1])
    with LLM(paths[0], **OPTIONS, enable_sleep_mode=True) as llm:
        inside = (
            lambda: llm.update_weights(new),
            llm.start_weight_update,
            llm.finish_weight_update,
            llm.unload_adapter,
            llm.sleep,
            llm.exit,
        )

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for change in inside:
                with pytest.raises(RuntimeError, match="until the call that does it has returned"):
                    change()
            yield from new.items()

        llm.update_weights(tensors())
        assert llm.weight_version == 1
        llm.start_weight_update()
        llm.update_weights(tensors())
        llm.finish_weight_update()
        assert llm.weight_version == 2
        wanted = results(llm)
        llm.update_weights(new)
        assert results(llm) == wanted


@pytest.mark.parametrize(
    "options", [{}, rare({"tensor_parallel_size": 2}), rare({"data_parallel_size": 2})]
)
def test_a_failure_half_way_needs_a_complete_update(
    options: dict[str, int], paths: tuple[Path, Path]
) -> None:
    new = tensors_of(paths[1])

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(new.items()):
            if i == 5:
                raise OSError("the other side has gone")
            yield item

    with LLM(paths[0], **OPTIONS, **options) as llm:
        wanted = results_after(llm, paths[1])
        llm.update_weights(tensors_of(paths[0]))
        for tensors, error in (
            (broken(), OSError),
            (((name, tensor) for name, tensor in new.items() if name != NORM), ValueError),
        ):
            with pytest.raises(error) as raised:
                llm.update_weights(tensors)
            again = r"update all of them again, or fill .* with unload_adapter\(\)"
            with pytest.raises(RuntimeError, match=again) as refused:
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            if not (options and error is OSError):  # nothing had been sent
                assert str(raised.value) in str(refused.value)
        assert llm.weight_version == 2
        llm.unload_adapter()
        assert results(llm) != wanted
        llm.update_weights(new)
        assert results(llm) == wanted


def test_an_update_goes_on_after_a_refused_call(paths: tuple[Path, Path]) -> None:
    """It had to begin again, and the calls that followed were told that none had begun."""
    new = tensors_of(paths[1])
    first, *rest = new.items()
    with LLM(paths[0], **OPTIONS) as llm:
        wanted = results_after(llm, paths[1])
        llm.update_weights(tensors_of(paths[0]))
        llm.start_weight_update()
        llm.update_weights([first])
        with share_weights([first]) as message:
            ended = message
            with pytest.raises(ValueError, match=f"{first[0]} comes twice"):
                llm.update_weights_ipc(message)
        with share_weights([rest[0]]) as message:
            ended = message
        with pytest.raises(RuntimeError, match="must not have ended the sharing"):
            llm.update_weights_ipc(ended)
        for tensors in ([("x", first[1])], {"x": first[1]}, iter([("x", first[1])])):
            with pytest.raises(ValueError, match="the model has no tensor x"):
                llm.update_weights(tensors)
        with pytest.raises(TypeError, match="got str"):
            llm.update_weights(["x"])
        with pytest.raises(RuntimeError, match=r"end that with finish_weight_update\(\)"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.update_weights(rest)
        llm.finish_weight_update()
        assert results(llm) == wanted


def test_versions_and_names_of_vllm(paths: tuple[Path, Path]) -> None:
    new = tensors_of(paths[1])
    with LLM(paths[0], **OPTIONS) as llm:
        for use, error in (
            (lambda: llm.update_weights(update_info={}), "pass the tensors themselves .*"),
            (
                lambda: llm.update_weights_ipc(update_info={}),
                r"has given in another process to update_weights_ipc\(\)",
            ),
            (lambda: llm.update_weights(new, weight_version="a"), "pass it as `version`"),
            (lambda: llm.finish_weight_update(version="a"), "pass it as `weight_version`"),
            (
                lambda: llm.reset_prefix_cache(reset_running_requests=True),
                r"finish requests first, or call abort_all\(\)",
            ),
        ):
            with pytest.raises(TypeError, match=rf"^\w+\(\) has no option `\w+`; .*{error}$"):
                use()
        for name in ("apply_model", "model_executor", "collective_rpc"):
            with pytest.raises(AttributeError, match=rf"has no `{name}`: update_weights\(\)"):
                getattr(llm.llm_engine, name)
        llm.reset_prefix_cache(reset_running_requests=False)
        llm.update_weights(new, version=np.int64(3))
        assert type(llm.weight_version) is int and llm.weight_version == 3
        for counted in (4, 5):  # no number twice
            llm.update_weights(new)
            assert llm.weight_version == counted
        for own in ("a", 2):
            llm.update_weights(new, version=own)
        llm.update_weights(new)
        assert llm.weight_version == 8
        llm.unload_adapter()
        assert llm.weight_version == 9
        with pytest.raises(TypeError, match="`version` must be an integer or a string, got True"):
            llm.update_weights(new, version=True)


@pytest.mark.parametrize("options", [{}, rare({"data_parallel_size": 2})])
def test_ends_of_a_tied_model_that_differ_change_nothing(
    options: dict[str, int], tmp_path: Path
) -> None:
    """Replicas had begun the update before they saw them."""
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    tensors = tensors_of(path)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    differ = tensors | {head: tensors[embedding] + 1}
    with LLM(path, **OPTIONS, **options) as llm:
        before = results(llm)
        for given in (differ, list(differ.items())):
            with pytest.raises(ValueError, match="save its checkpoint with `tie_word_embeddings`"):
                llm.update_weights(given)
            assert results(llm) == before
        differs = pytest.raises(ValueError, match="save its checkpoint with `tie_word_embeddings`")
        with share_weights(differ) as message, differs:
            llm.update_weights_ipc(message)
        assert results(llm) == before and llm.weight_version == 0
        values = torch.full_like(tensors[embedding], torch.nan)
        same = tensors | {embedding: values, head: values}
        for given in (same, iter(same.items())):  # values that are no numbers equal themselves
            llm.update_weights(given)
        assert llm.weight_version == 2


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_head_may_come_or_not(size: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    new = tensors_of(with_other_values(path, tmp_path / "other"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert head not in new
    options = {**OPTIONS, "tensor_parallel_size": size}
    with LLM(tmp_path / "other", **options) as fresh:
        wanted = results(fresh)
    with LLM(path, **options) as llm:
        old = tensors_of(path)
        both = new | {head: new[embedding].double()}
        alone = {name: tensor for name, tensor in both.items() if name != embedding}
        for tensors in (new, both, alone, reversed(both.items())):
            llm.update_weights(tensors)
            assert results(llm) == wanted
            llm.update_weights(old)
        llm.update_weights(new)
        for tensors in (new | {head: old[embedding]}, iter((new | {head: old[embedding]}).items())):
            assert results(llm) == wanted, "of a dictionary nothing is written"
            with pytest.raises(ValueError, match="save its checkpoint with `tie_word_embeddings`"):
                llm.update_weights(tensors)
        llm.update_weights(new)
        assert results(llm) == wanted


def test_a_tied_head_in_another_call_than_its_embedding(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    old, new = tensors_of(path), tensors_of(with_other_values(path, tmp_path / "other"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    rest = {name: tensor for name, tensor in new.items() if name != embedding}
    with LLM(tmp_path / "other", **OPTIONS) as fresh:
        wanted = results(fresh)
    with LLM(path, **OPTIONS, enable_sleep_mode=True) as llm:
        for forget in (llm.start_weight_update, partial(llm.sleep, level=2)):
            llm.start_weight_update()
            llm.update_weights([(embedding, old[embedding])])
            forget()
            llm.wake_up()
            if not llm._updates.has_started:
                llm.start_weight_update()
            bucket = new[embedding].clone()
            llm.update_weights([(embedding, bucket)])
            bucket.zero_()  # the caller uses it again
            llm.update_weights([(head, new[embedding])])
            llm.update_weights(rest)
            llm.finish_weight_update()
            assert results(llm) == wanted
        llm.start_weight_update()
        with share_weights({embedding: new[embedding]}) as message:
            llm.update_weights_ipc(message)
        differs = pytest.raises(ValueError, match="save its checkpoint with `tie_word_embeddings`")
        with share_weights({head: old[embedding]}) as message, differs:
            llm.update_weights_ipc(message)
        llm.update_weights(new)
        llm.start_weight_update()
        llm.sleep()
        for use in (lambda: llm.update_weights(new), llm.finish_weight_update):
            with pytest.raises(RuntimeError, match=r'call wake_up\(tags=\["weights"\]\) first'):
                use()
        llm.wake_up()
        llm.update_weights(new)
        llm.finish_weight_update()
        assert results(llm) == wanted


@pytest.mark.parametrize("way", ["in this process", rare("by IPC"), rare("an adapter")])
def test_a_replica_that_dies_does_not_come_back_with_old_weights(
    way: str, paths: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = PROMPTS * 8
    adapter = str(make_adapter(paths[0], tmp_path / "adapter", r=4))

    def change(llm: LLM) -> None:
        if way == "an adapter":
            llm.load_adapter(adapter)
        elif way == "by IPC":
            with share_weights(tensors_of(paths[1])) as message:
                llm.update_weights_ipc(message)
        else:
            llm.update_weights(tensors_of(paths[1]))

    with LLM(paths[0], **OPTIONS) as fresh:
        before = tokens(fresh.generate(prompts, greedy(20), use_tqdm=False))
        change(fresh)
        wanted = tokens(fresh.generate(prompts, greedy(20), use_tqdm=False))
        assert wanted != before
    with LLM(paths[0], data_parallel_size=2, **OPTIONS) as llm:
        change(llm)
        processes = [replica.process for replica in llm.executor._replicas.values()]
        ids = [llm.add_request(prompt, greedy(20)) for prompt in prompts]
        llm.step()
        processes[0].kill()
        found = {}
        while not llm.is_finished():
            found |= {output.request_id: output["token_ids"] for output in llm.step()}
        assert [found[i] for i in ids] == wanted
        assert llm.metrics()["num_replica_restarts"] == 0
    assert "the weights have been updated" in caplog.text
