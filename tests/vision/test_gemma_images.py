"""Gemma 3, whose tokens of an image see each other, against transformers' `generate`: no chunk and
no prefix of the cache ends inside an image.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import MODES, SMALL_POOLS, Mode, engine_in
from safetensors.torch import load_file, save_file
from vision_checkpoints import (
    given_to_generate,
    make_gemma3,
    picture,
    reference,
    reference_beams,
    run,
)

from checkpoints import SMALL, greedy, tokens, with_rare
from nanovllm import LLM, BeamSearchParams
from nanovllm.attention.base import QKV
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.compiling import rehearsal
from nanovllm.distributed.group import Group
from nanovllm.layers import attention

ONE, TWO, THREE = (picture(64, 64, seed) for seed in (1, 2, 3))
PROMPTS: list[list[Any]] = [
    [[1, 2, 3], ONE, [4, 5, 6]],
    [[7] * 20],
    [ONE, [9], TWO],
    [[5] * 10, TWO, [3] * 12, THREE, [1]],
    [[5] * 10, TWO, [3] * 12, ONE, [1]],
    [[5] * 10, THREE, [3] * 12, ONE, [1]],
    [[5] * 10, TWO, [3] * 12, [2]],
    [ONE, [4], ONE, [6]],
    [[5] * 10, TWO, [8] * 3],
]
LENGTHS = [42, 55, 39, 44, 39, 42, 37, 48, 29]
PARAMS = [greedy(n) for n in LENGTHS]
# A step has room for an image. Without a cache the small pool is enough for layers that slide.
FITTING = {
    name: options
    for name, options in {**MODES, **SMALL_POOLS}.items()
    if options.get("max_num_batched_tokens", 64) >= 16 and name != "small-pool-no-cache"
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    found = [reference(path, *request) for request in zip(PROMPTS, LENGTHS, strict=True)]
    assert found[4][:9] != found[5][:9]
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("name", with_rare(FITTING, *FITTING.keys() - {"chunks", "small-pool"}))
def test_tokens_are_those_of_transformers(
    name: str, overlap: bool, path: Path, wanted: list[list[int]]
) -> None:
    with engine_in(Mode(name, overlap), path) as llm:
        assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
        assert llm.metrics()["num_images_encoded"] >= 3


@pytest.mark.parametrize("most", [SMALL["max_num_batched_tokens"], 24])
def test_the_kernel_for_prompts_sees_to_the_ends_of_images(
    most: int, path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In layers that slide, too, beside decodes and in chunks: nothing is attended again."""
    kernels = TritonBackend()
    limits = []

    def prefill(self: Any, qkv: QKV, cache: Any, context: Any, scoring: Any) -> torch.Tensor:
        if context.images is not None:
            limits.append(context.images.limits[context.num_decodes :])
        return kernels.prefill(qkv, cache, context, scoring)

    def attend_again(*args: Any) -> None:
        raise AssertionError("attended again")

    monkeypatch.setattr(TorchBackend, "prefill", prefill)
    monkeypatch.setattr(TorchBackend, "attends_in_images", True)
    monkeypatch.setattr(attention, "attend_in_images", attend_again)
    some, count = [0, 1, 2, 3, 7], 8
    with LLM(path, **{**SMALL, "max_num_batched_tokens": most}) as llm:
        found = run(llm, [PROMPTS[i] for i in some], [greedy(count)] * len(some))
    assert tokens(found) == [wanted[i][:count] for i in some]
    beyond = [(each.diff() <= 0).any() for each in limits]
    assert limits and all(beyond), "rows that see as far as the next ones"


def test_kernels_for_images_are_rehearsed(
    path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts and long ones, with and without cached tokens; a model of text has none."""
    monkeypatch.setattr(rehearsal, "StaticInputs", lambda *args: None)  # which are for CUDA graphs
    for model, has_images in ((path, True), (checkpoint, False)):
        limits = []
        with LLM(model, **SMALL) as llm:
            built = llm.model_runner.built

            def compute(inputs: Any, built: Any = built, limits: Any = limits) -> Any:
                context = inputs.context
                if context.images is not None:
                    assert torch.equal(context.images.limits, inputs.positions + 1)
                    limits.append((context.max_seqlen_q, context.num_keys > len(inputs.positions)))
                    with torch.inference_mode():
                        built.step.run_model(inputs)

            facts = llm.config, llm.model_config, Group(), torch.device("cpu")
            most = {"max_model_len": llm.max_model_len, "members": 0, "max_prompt_tokens": 0}
            rehearsal.Rehearsal(compute, built.step.model, built.pool, *facts, **most)._prompts()
        assert bool(limits) == has_images
        if has_images:
            assert {(n > 32, cached) for n, cached in limits} == {*product([False, True], repeat=2)}


def test_beams_are_those_of_transformers(path: Path) -> None:
    prompts: list[list[Any]] = [[[5] * 12, image, [3] * 17] for image in (ONE, TWO)]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with LLM(path, **SMALL) as llm:
        outputs = llm.beam_search([given_to_generate(path, parts) for parts in prompts], params)
        assert llm.metrics()["num_images_encoded"] == 2
    for parts, output in zip(prompts, outputs, strict=True):
        wanted = reference_beams(path, parts, 3, 6)
        assert [beam.tokens for beam in output.sequences] == [ids for ids, _ in wanted]
        found = [beam.cum_logprob for beam in output.sequences]
        assert found == pytest.approx([total for _, total in wanted], abs=1e-3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 2])
def test_chunks_and_prefixes_end_before_images(
    path: Path, wanted: list[list[int]], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 20 tokens, in which images of 16 begin anywhere."""
    options = {**SMALL, "max_num_batched_tokens": 20, "tensor_parallel_size": size}
    with LLM(path, **options) as llm:
        items = []
        schedule = llm.scheduler.schedule

        def spy() -> Any:
            found = schedule()
            items.extend(found)
            return found

        monkeypatch.setattr(llm.scheduler, "schedule", spy)
        cached = []
        for i in (3, 4, 6, 8, 3):
            [output] = run(llm, [PROMPTS[i]], [PARAMS[i]])
            assert output["token_ids"] == wanted[i]
            cached.append(output.num_cached_tokens)
    # Images lie at 11 to 27 and at 41 to 57; blocks of 16 are cached up to 32, 32, 16 and 48.
    assert cached == [0, 32, 32, 0, 32]
    for item in items:
        for placed in item.seq.images:
            assert not placed.offset < item.start < placed.end, "a chunk begins inside"
            assert not placed.offset < item.end < placed.end, "a chunk ends inside"


SPELLINGS = {
    "as published": {"vision_tower.": "vision_tower.vision_model."},
    "below model": {
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_names_of_tensors(
    spelling: str, path: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """And a head of the tower, which nothing uses."""
    other = tmp_path / "published"
    shutil.copytree(path, other)
    tensors = load_file(path / "model.safetensors")
    tensors["vision_tower.head.probe"] = torch.zeros(1, 1, 32)
    for old, new in SPELLINGS[spelling].items():
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)
    save_file(tensors, other / "model.safetensors")
    with LLM(other, **SMALL) as llm:
        assert tokens(run(llm, PROMPTS[:3], PARAMS[:3])) == wanted[:3]


def test_a_step_must_have_room_for_an_image(path: Path) -> None:
    options = {**SMALL, "max_num_batched_tokens": 15}
    with pytest.raises(ValueError, match=r"must be at least 16, the tokens of an image"):
        LLM(path, **options)
    with LLM(path, **options, language_model_only=True) as llm:
        assert llm.model_runner.built.encoder is None
    with pytest.raises(ValueError, match=r"`batch_invariant` without kernels .* see each other"):
        LLM(path, **SMALL, batch_invariant=True)
