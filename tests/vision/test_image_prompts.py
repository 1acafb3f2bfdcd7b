"""Prompts with images against transformers' `generate`, with the pixels of its own processor:
tiny random checkpoints, float32, CPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from modes import Mode, engine_in, in_every_mode
from safetensors.torch import load_file
from vision_checkpoints import (
    VISION,
    add,
    given_to_generate,
    picture,
    reference,
    reference_beams,
    reference_logprobs,
    reference_model,
    run,
    with_inputs_first,
)

from checkpoints import SMALL, copy_checkpoint, edit_json, greedy, rare, tokens
from nanovllm import LLM, BeamSearchParams, SamplingParams, share_weights

FLAT, TALL = picture(32, 256, 1), picture(192, 64, 2)
LARGE, OTHER = picture(160, 192, 3), picture(160, 192, 4)  # of equal size
SMALL_ONE = picture(32, 32, 5)
CHANGED = LARGE.copy()
CHANGED[100, 7, 1] ^= 1  # one bit of one pixel
# One image and two, wide and tall, at the beginning, between text and at the end, equal twice;
# prefixes with an equal image, with another of its size, and with one that differs in a bit.
PROMPTS: list[list[Any]] = [
    [[1, 2, 3], FLAT, [4, 5, 6]],
    [[7] * 20],
    [FLAT, [9], TALL],
    [[5], LARGE, [3] * 12],
    [[5], OTHER, [3] * 12],
    [[5], LARGE, [3] * 12, [1]],
    [[5], CHANGED, [3] * 12],
    [LARGE, [4], LARGE, [6]],
    [[8] * 40, SMALL_ONE, [2], TALL, [2]],
]
LENGTHS = [12, 25, 9, 24, 19, 22, 17, 18, 20]
PARAMS = [greedy(n) for n in LENGTHS]
MODELS = ["qwen3-vl", "qwen3.5"]


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of Qwen3-VL, unless a test asks for others."""
    kind = getattr(request, "param", "qwen3-vl")
    return VISION[kind](tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    """What transformers says; something else of each large picture."""
    found = [reference(path, *request) for request in zip(PROMPTS, LENGTHS, strict=True)]
    assert found[3][:9] != found[4]
    return found


@pytest.mark.parametrize("path", MODELS, indirect=True)
@in_every_mode("chunks-overlap", "chunks-of-7", "small-pool-overlap", "no-cache")
def test_tokens_are_those_of_transformers(mode: Mode, path: Path, wanted: list[list[int]]) -> None:
    with engine_in(mode, path) as llm:
        assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
        metrics = llm.metrics()
        assert metrics["num_images_encoded"] >= 6, "different images"
        if mode.caches:
            assert metrics["num_image_hits"] > 0


@in_every_mode("chunks-overlap", "no-cache", pools=False)
def test_beams_are_those_of_transformers(mode: Mode, path: Path) -> None:
    """They share the prompt's blocks, and its image is encoded once; that of another prompt with
    the same text is another.
    """
    prompts = [[[5] * 12, image, [3] * 17] for image in (LARGE, OTHER)]
    expected = [reference_beams(path, parts, 3, 6) for parts in prompts]
    assert expected[0][0][0] != expected[1][0][0]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with engine_in(mode, path) as llm:
        outputs = llm.beam_search([given_to_generate(path, parts) for parts in prompts], params)
        metrics = llm.metrics()
    for output, beams in zip(outputs, expected, strict=True):
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in beams]
        found = [beam.cum_logprob for beam in output.sequences]
        assert found == pytest.approx([total for _, total in beams], abs=1e-3)
    assert metrics["num_images_prepared"] == 2
    if mode.caches:
        assert metrics["num_images_encoded"] == 2
        assert metrics["num_cached_tokens"] >= 2 * 5 * 32, "blocks of the prompts"


def test_a_prefix_of_the_cache_is_of_the_same_image(path: Path, wanted: list[list[int]]) -> None:
    """One after another: the same is found across its image; another image of equal size is not,
    nor one that differs in a bit of a pixel.
    """
    with LLM(path, **SMALL) as llm:
        cached, encoded = [], []
        for i in (3, 5, 4, 6, 3):
            [output] = run(llm, [PROMPTS[i]], [PARAMS[i]])
            assert output["token_ids"] == wanted[i]
            cached.append(output.num_cached_tokens)
            encoded.append(llm.metrics()["num_images_encoded"])
        assert cached == [0, 32, 0, 0, 32], "of 45 and 46 tokens, in blocks of 16"
        assert encoded == [1, 1, 2, 3, 3]
        # The second and the last needed rows of the image that the prefix had not.
        assert llm.metrics()["num_image_hits"] == 2


def test_a_chunk_may_end_inside_an_image_and_before_one(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside, if the image is in the store; before, if the store has no room for it beside one that
    another sequence has begun.
    """
    small = {**SMALL, "max_num_batched_tokens": 24, "max_model_len": 80}
    with LLM(path, **small) as llm:
        # Room for one large image and half of another.
        cache = llm.scheduler.images
        monkeypatch.setattr(cache, "_facts", cache._facts._replace(capacity=45))
        cache.forget()
        steps = []
        schedule = llm.scheduler.schedule

        def spy() -> Any:
            steps.append(schedule())
            return steps[-1]

        monkeypatch.setattr(llm.scheduler, "schedule", spy)
        which = [4, 3, 4]
        found = run(llm, [PROMPTS[i] for i in which], [PARAMS[i] for i in which])
        assert tokens(found) == [wanted[i] for i in which]
        assert llm.metrics()["num_images_encoded"] == 2, "one that is held stays"
    ends = [item.end for step in steps for item in step if item.start < item.seq.images_end]
    assert ends.count(2) == 1, "before the image, since the other one is held"
    assert any(2 < end < 32 for end in ends), "inside an image"


@pytest.mark.parametrize("path", ["qwen3.5"], indirect=True)
def test_a_snapshot_inside_an_image_is_of_the_same_image(path: Path) -> None:
    """States after 64 tokens, of which 43 are of an image: they serve the same prefix alone."""
    image, other = picture(224, 256, 6), picture(224, 256, 7)
    begin, params = [[1] * 20], [greedy(8)] * 4
    prompts = [[*begin, which, [last]] for which, last in ((image, 1), (image, 2), (other, 1))]
    wanted = [reference(path, prompt, 8) for prompt in prompts]
    assert wanted[0] != wanted[2]
    with LLM(path, **{**SMALL, "max_num_batched_tokens": 96}) as llm:
        found = run(llm, prompts, params[:3])
        assert tokens(found) == wanted
        assert [output.num_cached_tokens for output in found] == [0, 64, 0]
        metrics = llm.metrics()
        assert metrics["num_snapshot_hits"] == 1 and metrics["num_images_encoded"] == 2


def test_samples_and_log_probabilities_are_those_of_transformers(path: Path) -> None:
    """Two samples of a prompt, whose image is encoded once, and scores of all its tokens."""
    parts, asked = PROMPTS[2], {"logprobs": 0, "prompt_logprobs": 0}
    params = SamplingParams(seed=5, n=2, max_tokens=12, **asked)
    with LLM(path, **SMALL) as llm:
        [output] = run(llm, [parts], [params])
        assert llm.metrics()["num_images_encoded"] == 2
    ids, count = output.prompt_token_ids, len(output.prompt_token_ids)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    for sample in output.outputs:
        wanted = reference_logprobs(path, parts, sample.token_ids)
        behind = wanted[count - 1 :].gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        found = [
            each[token].logprob
            for each, token in zip(sample.logprobs, sample.token_ids, strict=True)
        ]
        torch.testing.assert_close(torch.tensor(found), behind, atol=1e-3, rtol=1e-3)
    within = wanted[: count - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = [
        each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), within, atol=1e-3, rtol=1e-3)


def test_an_image_goes_when_another_needs_its_rows(path: Path, wanted: list[list[int]]) -> None:
    """A store for 128 tokens of 158: some are encoded again when their prompts come again."""
    with LLM(path, **SMALL, enable_prefix_caching=False) as llm:
        others = [[[1], picture(192, 192, 10 + i), [2]] for i in range(3)]
        params = [greedy(1)] * 3
        for _ in range(2):
            assert tokens(run(llm, PROMPTS[3:4], PARAMS[3:4])) == wanted[3:4]
            run(llm, others, params)
        metrics = llm.metrics()
        assert metrics["num_images_encoded"] == 8 and metrics["num_image_hits"] == 0


@pytest.mark.parametrize(
    ("path", "size"), [("qwen3.5", 2), rare("qwen3-vl", 2), rare("qwen3-vl", 4)], indirect=["path"]
)
def test_workers_have_the_whole_tower(path: Path, wanted: list[list[int]], size: int) -> None:
    """Pixels reach all of them, in chunks and with overlap."""
    assert_ranks_have_it(path, wanted, size)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("path", ["qwen3-vl"], indirect=True)
def test_ranks_have_the_whole_tower(path: Path, wanted: list[list[int]]) -> None:
    assert_ranks_have_it(path, wanted, 2)


def assert_ranks_have_it(path: Path, wanted: list[list[int]], size: int) -> None:
    options = {**SMALL, "tensor_parallel_size": size, "max_num_batched_tokens": 24, "overlap": True}
    with LLM(path, **options) as llm:
        assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
        assert llm.metrics()["num_images_encoded"] >= 6


def test_one_token_at_a_time(path: Path, wanted: list[list[int]]) -> None:
    with LLM(path, **SMALL, batch_invariant=True) as llm:
        assert tokens(run(llm, PROMPTS[:5], PARAMS[:5])) == wanted[:5]


def test_an_error_in_the_tower_leaves_the_engine_usable(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is repeated, and encodes its images again."""
    with LLM(path, **SMALL) as llm:
        tower = llm.model_runner.model.visual
        broken = [True, True]

        def fail(*_: Any) -> None:
            if broken:
                broken.pop()
                raise MemoryError("no room")

        tower.register_forward_pre_hook(fail)
        ids = [add(llm, *request) for request in zip(PROMPTS[:4], PARAMS[:4], strict=True)]
        for _ in range(2):
            with pytest.raises(MemoryError):
                llm.step()
        found = {}
        while not llm.is_finished():
            found.update((output.request_id, output["token_ids"]) for output in llm.step())
        assert [found[i] for i in ids] == wanted[:4]
        add(llm, PROMPTS[4], PARAMS[4])
        llm.step()
        llm.abort_all()
        assert tokens(run(llm, PROMPTS[4:6], PARAMS[4:6])) == wanted[4:6]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("path", ["qwen3-vl-moe"], indirect=True)
@pytest.mark.parametrize(("size", "published"), [(1, False), (2, True)])
def test_experts_in_one_tensor(
    path: Path, wanted: list[list[int]], size: int, published: bool, tmp_path: Path
) -> None:
    """Either way round, as transformers reads them."""
    if published:
        path = with_inputs_first(path, tmp_path / "published")
        assert reference(path, PROMPTS[3], 6) == wanted[3][:6]
    with LLM(path, **SMALL, tensor_parallel_size=size) as llm:
        assert tokens(run(llm, PROMPTS, PARAMS)) == wanted


@pytest.mark.parametrize("path", ["qwen3-vl-moe"], indirect=True)
def test_new_weights_have_experts_either_way_round(
    path: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """A model of transformers has them the other way round than published files."""
    mirrored = with_inputs_first(path, tmp_path / "mirrored")
    other = VISION["qwen3-vl-moe"](tmp_path / "other", seed=9)
    published = with_inputs_first(other, tmp_path / "published")
    for engine, new in (
        (published, reference_model(path).state_dict()),
        (other, load_file(mirrored / "model.safetensors")),
    ):
        with LLM(engine, **SMALL) as llm:
            before = tokens(run(llm, PROMPTS, PARAMS))
            assert before != wanted
            llm.update_weights(new)
            assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
            llm.update_weights(load_file(engine / "model.safetensors"))
            assert tokens(run(llm, PROMPTS, PARAMS)) == before
            with share_weights(new) as message:
                llm.update_weights_ipc(message)
            assert tokens(run(llm, PROMPTS, PARAMS)) == wanted


def test_replicas_get_the_pixels(path: Path, wanted: list[list[int]]) -> None:
    with LLM(path, **SMALL, data_parallel_size=2) as llm:
        prompts = [given_to_generate(path, parts) for parts in PROMPTS]
        assert tokens(llm.generate(prompts, PARAMS, use_tqdm=False)) == wanted
        assert llm.metrics()["num_images_encoded"] >= 6, "in all replicas together"


def test_new_weights_are_those_of_the_tower_too(
    path: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """What was encoded with old weights is encoded again. And sleep keeps what is there."""
    other = VISION["qwen3-vl"](tmp_path / "other", seed=9)
    which = slice(2, 5)
    by_others = [
        reference(other, *pair) for pair in zip(PROMPTS[which], LENGTHS[which], strict=True)
    ]
    assert by_others != wanted[which]
    with LLM(path, **SMALL, enable_sleep_mode=True) as llm:
        for weights, found in ((other, by_others), (path, wanted[which])):
            llm.update_weights(load_file(weights / "model.safetensors"))
            before = llm.metrics()["num_images_encoded"]
            assert tokens(run(llm, PROMPTS[which], PARAMS[which])) == found
            assert llm.metrics()["num_images_encoded"] == before + 4
        llm.sleep()
        llm.wake_up()
        assert tokens(run(llm, PROMPTS[which], PARAMS[which])) == wanted[which]
        assert llm.metrics()["num_images_encoded"] == before + 8


@pytest.mark.parametrize("path", ["qwen3.5"], indirect=True)
def test_new_weights_of_the_text_model_alone(path: Path, tmp_path: Path) -> None:
    """The error's remedies: the checkpoint's own tower, too, or an engine without it."""
    other = VISION["qwen3.5"](tmp_path / "other", seed=9)
    learner = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    new = learner.state_dict()
    tower = {k: v for k, v in load_file(other / "model.safetensors").items() if ".visual." in k}
    text, image = slice(1, 2), slice(2, 3)
    with LLM(path, **SMALL) as fresh:
        wanted = run(fresh, PROMPTS[text], [greedy(9, logprobs=2)])
    with LLM(other, **SMALL) as llm:
        before = tokens(run(llm, PROMPTS[image], PARAMS[image]))
        remedy = "visual.*: pass the .* tensors of the part for images, too, or .*_only=True$"
        with pytest.raises(ValueError, match=f"missing from the update: {remedy}"):
            llm.update_weights(new)
        with pytest.raises(
            ValueError, match=r"missing from the update: model\.norm\.weight, vis[^:]+$"
        ):
            llm.update_weights({k: v for k, v in new.items() if k != "model.norm.weight"})
        llm.update_weights(new | tower)
        assert same(run(llm, PROMPTS[text], [greedy(9, logprobs=2)]), wanted)
        assert tokens(run(llm, PROMPTS[image], PARAMS[image])) != before
    with LLM(other, **SMALL, language_model_only=True) as llm:
        llm.update_weights(new)
        assert same(run(llm, PROMPTS[text], [greedy(9, logprobs=2)]), wanted)


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether outputs have the same tokens and log-probabilities."""
    return [list(each.outputs[0].logprobs) for each in some] == [
        list(each.outputs[0].logprobs) for each in others
    ]


def test_without_the_tower_text_runs_as_before(path: Path, wanted: list[list[int]]) -> None:
    """`language_model_only`, and a checkpoint that lacks a processor."""
    with LLM(path, **SMALL, language_model_only=True) as llm:
        assert tokens(run(llm, PROMPTS[1:2], PARAMS[1:2])) == wanted[1:2]
        assert llm.model_runner.built.encoder is None
        assert "num_images_encoded" not in llm.metrics()


def test_a_token_of_images_beyond_the_vocabulary_is_refused(path: Path, tmp_path: Path) -> None:
    """Before weights are read."""
    other = copy_checkpoint(path, tmp_path / "model")
    size = json.loads((path / "config.json").read_text())["text_config"]["vocab_size"]
    edit_json(other / "config.json", image_token_id=size)
    says = rf"one of the model's {size}, got {size}: .*\({size + 1}\)"
    with pytest.raises(ValueError, match=says):
        LLM(other, **SMALL)
    LLM(other, **SMALL, language_model_only=True).exit()


def test_recordings_have_the_encoding_of_images(
    path: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    trace = tmp_path / "run.json"
    with LLM(path, **SMALL, overlap=True) as llm:
        with llm.trace(trace):
            assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
        encoded = llm.metrics()["num_images_encoded"]
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    of_steps = [event["args"] for event in events if event.get("cat") == "step"]
    steps = [args for args in of_steps if "images" in args]
    slices = [event for event in events if event["name"] == "encode"]
    assert sum(args["images"] for args in steps) == encoded >= 6
    assert [args["encode_us"] for args in steps] == [each["dur"] for each in slices]
    assert all(0 < args["encode_us"] <= args["launch_us"] for args in steps)
