"""`LLM.embed` against the hidden states of transformers."""

import math
import shutil
from typing import Any

import pytest
import torch
from invariants import check_scheduler
from modes import PREFIXED as PROMPTS
from modes import Mode, engine_in, in_every_mode
from safetensors.torch import load_file, save_file

from checkpoints import (
    SMALL,
    assert_idle,
    assert_usable,
    greedy,
    make_checkpoint,
    rare,
    reference,
    reference_hidden,
    run_past_a_failure,
    tokens,
)
from faults import fail_at
from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler

TOLERANCE = 1e-4


def pooled(path: Any, token_ids: list[int], pooling: str) -> torch.Tensor:
    """Embedding by transformers: [M]."""
    hidden = reference_hidden(path, token_ids)
    return hidden[-1] if pooling == "last" else hidden.mean(0)


def assert_right(path: Any, outputs: Any, prompts: Any, pooling: str) -> None:
    """The vectors, not normalized, are those of transformers."""
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output in outputs:
        assert output.finished is True
        found = torch.tensor(output.outputs.embedding)
        expected = pooled(path, output.prompt_token_ids, pooling)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def embed(llm: LLM, pooling: str, prompts: Any = PROMPTS) -> Any:
    return llm.embed(prompts, pooling, normalize=False, use_tqdm=False)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@in_every_mode(
    *("chunks", "chunks-of-7", "chunks-beside-decodes-overlap", "no-cache"),
    pools=False,
)
def test_vectors_are_those_of_transformers(mode: Mode, pooling: str, checkpoint: Any) -> None:
    """Slots, which sums of chunks go by, are used again and again; so is what is cached."""
    with engine_in(mode, checkpoint) as llm:
        for prompts in (PROMPTS, PROMPTS[::-1]):
            assert_right(checkpoint, embed(llm, pooling, prompts), prompts, pooling)
        cached = llm.metrics()["num_cached_tokens"]
        assert (cached > 0) == (pooling == "last" and mode.caches)
        assert_usable(llm, checkpoint)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_what_others_have_cached(pooling: str, checkpoint: Any) -> None:
    """The mean needs every hidden state; the last one does not."""
    with LLM(checkpoint, **{**SMALL, "max_num_batched_tokens": 20}) as llm:
        llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        before = llm.metrics()["num_cached_tokens"]
        assert_right(checkpoint, embed(llm, pooling), PROMPTS, pooling)
        assert (llm.metrics()["num_cached_tokens"] > before) == (pooling == "last")
        outputs = llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        assert tokens(outputs) == [reference(checkpoint, prompt, 3) for prompt in PROMPTS]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("size", [2, rare(4)])
@pytest.mark.usefixtures("threads")
def test_ranks_agree(size: int, pooling: str, tmp_path: Any) -> None:
    path = make_checkpoint(tmp_path / "odd", vocab_size=131, num_key_value_heads=1)
    options = {**SMALL, "max_num_batched_tokens": 24}
    with LLM(path, tensor_parallel_size=size, **options) as llm:
        assert_right(path, embed(llm, pooling), PROMPTS, pooling)


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.usefixtures("low_guesses")
def test_preempted_prompts(
    pooling: str, overlap: bool, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sequences that grow, prompts lose their blocks, and their slots, half-way."""
    computed = []  # tokens of the preempted prompts
    preempt = Scheduler.preempt

    def record(self: Scheduler, seq: Any) -> None:
        if seq.pooling is not None:
            computed.append(seq.num_computed_tokens)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "preempt", record)
    growing = [[i, *range(12 * i, 12 * i + 13)] for i in range(3)]
    prompts = [[100 - i for i in range(60)], [*range(50, 80)], [*range(40)], [8] * 33]
    options = {"num_kvcache_blocks": 9, "max_num_seqs": 5, "max_num_batched_tokens": 6}
    with LLM(checkpoint, overlap=overlap, **{**SMALL, **options}) as llm:
        # `embed` refuses to run beside others: its requests are queued as it does.
        ids = [llm.add_request(prompt, greedy(40)) for prompt in growing]
        ids += [llm._add(llm._intake.check(prompt, greedy(1)), pooling) for prompt in prompts]
        found = {}
        while not llm.is_finished():
            found.update((output.request_id, output) for output in llm.step())
            check_scheduler(llm.scheduler)
        assert any(computed), "none in the middle of its prompt"
        assert llm.metrics()["num_preemptions"] >= len(computed)
    outputs = [found[i] for i in ids]
    assert tokens(outputs[:3]) == [reference(checkpoint, prompt, 40) for prompt in growing]
    assert all(output.embedding is None for output in outputs[:3])
    for output, prompt in zip(outputs[3:], prompts, strict=True):
        vector, expected = torch.tensor(output.embedding), pooled(checkpoint, prompt, pooling)
        torch.testing.assert_close(vector, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("k", [1, 3])
def test_failed_launch_is_repeated(
    k: int, pooling: str, overlap: bool, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that failed late had added its hidden states to the sum, and so did its repeat."""
    with LLM(checkpoint, overlap=overlap, **{**SMALL, "max_num_batched_tokens": 24}) as llm:
        ids = [llm._add(llm._intake.check(prompt, greedy(1)), pooling) for prompt in PROMPTS]
        fail_at(
            monkeypatch, llm.model_runner, "launch", k, RuntimeError("out of memory"), after=True
        )
        found = run_past_a_failure(llm)
    for i, prompt in zip(ids, PROMPTS, strict=True):
        vector, expected = torch.tensor(found[i].embedding), pooled(checkpoint, prompt, pooling)
        torch.testing.assert_close(vector, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_normalized_vectors(checkpoint: Any) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        for pooling in ("last", "mean"):
            outputs = llm.embed(PROMPTS, pooling, use_tqdm=False)  # normalized unless told
            for output, plain in zip(outputs, embed(llm, pooling), strict=True):
                assert math.hypot(*output.outputs.embedding) == pytest.approx(1)
                vector = torch.tensor(plain.outputs.embedding)
                expected = (vector / vector.norm()).tolist()
                assert output.outputs.embedding == pytest.approx(expected, abs=1e-6)
        default = llm.embed(PROMPTS[0], use_tqdm=False)[0]
        last = llm.embed(PROMPTS[0], "last", use_tqdm=False)[0]
        assert default.outputs.embedding == pytest.approx(last.outputs.embedding, abs=1e-6)


def test_vectors_of_zeros_have_no_direction(checkpoint: Any) -> None:
    with LLM(checkpoint, **SMALL) as llm, torch.inference_mode():
        llm.model_runner.model.model.norm.weight.zero_()
        [output] = llm.embed([1, 2], use_tqdm=False)
    assert output.outputs.embedding == [0.0] * 64


def test_many_prompts_keep_their_order(checkpoint: Any) -> None:
    prompts = [[i % 128, i // 128, *range(i % 13)] for i in range(300)]
    with LLM(checkpoint, **{**SMALL, "max_num_batched_tokens": 50}) as llm:
        for pooling in ("last", "mean"):
            outputs = embed(llm, pooling, prompts)
            ids = [output.request_id for output in outputs]
            assert ids == list(range(ids[0], ids[0] + 300))
            assert_right(checkpoint, outputs, prompts, pooling)
        assert llm.embed([], use_tqdm=False) == []


def test_text_and_other_forms_of_prompts(tiny: str, reference: Any) -> None:
    with LLM(tiny, device="cpu", num_kvcache_blocks=8) as llm:
        ids = llm.tokenizer.encode("127+345=")
        prompts = ["127+345=", ids, {"prompt_token_ids": ids}]
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state[0]
        for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
            outputs = embed(llm, pooling, prompts) + embed(llm, pooling, prompts[0])
            assert len(outputs) == 4
            for output in outputs:
                found = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_generate_goes_on_as_before(checkpoint: Any) -> None:
    """Neither its tokens nor the lengths that admission expects."""
    params = SamplingParams(2.0, 12, seed=5)
    with LLM(checkpoint, **SMALL) as llm:
        before = tokens(llm.generate(PROMPTS, params, use_tqdm=False))
    with LLM(checkpoint, **SMALL) as llm:
        for pooling in ("mean", "last"):
            llm.embed(PROMPTS, pooling, use_tqdm=False)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert tokens(outputs) == before
        assert all(output.embedding is None for output in outputs)
    with LLM(checkpoint, **SMALL) as llm:
        llm.embed(PROMPTS, use_tqdm=False)
        prompts = [[i, *range(13)] for i in range(8)]
        llm.generate(prompts, SamplingParams(0, 100), use_tqdm=False)
        assert llm.metrics()["num_preemptions"] == 0


def test_a_checkpoint_that_was_saved_without_its_head(tmp_path: Any) -> None:
    """Qwen3-Embedding is such a one: nothing is called `model.`."""
    path = make_checkpoint(tmp_path / "whole", tie_word_embeddings=True)
    bare = shutil.copytree(path, tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file({k.removeprefix("model."): v for k, v in tensors.items()}, bare / "model.safetensors")
    with LLM(str(bare), **SMALL) as llm:
        assert_right(path, embed(llm, "last", PROMPTS[:3]), PROMPTS[:3], "last")


def test_refusals(checkpoint: Any) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        for pooling in ("first", "", None, 3, ["last"]):
            with pytest.raises(ValueError, match="`pooling` must be one of last, mean, got"):
                llm.embed(PROMPTS, pooling)
        for normalize in (1, None, "yes"):
            with pytest.raises(TypeError, match="`normalize` must be True or False, got"):
                llm.embed(PROMPTS, normalize=normalize)
        with pytest.raises(ValueError, match=r"`prompts\[1\]` must have at least one token"):
            llm.embed([[1], []])
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.embed("text")
        with pytest.raises(ValueError, match="must leave room for one token"):
            llm.embed([1] * 128)
        assert_idle(llm)
        request_id = llm.add_request([1, 2], greedy(3))
        llm.step()
        with pytest.raises(RuntimeError, match="are left"):
            llm.embed([[1, 2]])
        found = {}
        while not llm.is_finished():
            found.update((output.request_id, output["token_ids"]) for output in llm.step())
        assert found == {request_id: reference(checkpoint, [1, 2], 3)}
        assert_usable(llm, checkpoint)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.embed([[1, 2]])


def test_an_error_leaves_nothing_behind(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(checkpoint, **{**SMALL, "max_num_batched_tokens": 24}) as llm:
        for pooling in ("last", "mean"):
            with monkeypatch.context() as patch:
                fail_at(
                    patch, llm.model_runner, "launch", 3, RuntimeError("out of memory"), after=True
                )
                with pytest.raises(RuntimeError, match="out of memory"):
                    embed(llm, pooling)
            assert_usable(llm, checkpoint)
            assert_right(checkpoint, embed(llm, pooling), PROMPTS, pooling)
