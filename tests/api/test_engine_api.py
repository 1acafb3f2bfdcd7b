"""The engine as callers see it: outputs, end-of-sequence tokens, metrics, step API."""

import functools
import logging
import pydoc

import pytest
import torch
from invariants import check_scheduler

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    add_all,
    assert_idle,
    assert_usable,
    copy_checkpoint,
    edit_json,
    greedy,
    rare,
    reference,
    references,
    run_steps,
)
from nanovllm import LLM, AsyncLLM, CompletionOutput, SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.tracing.metrics import Latencies

# -- outputs --------------------------------------------------------------------------------------


def test_output_reads_both_ways(llm, checkpoint):
    prompt = list(range(40))
    [first] = llm.generate(prompt, greedy(5), use_tqdm=False)
    [output] = llm.generate(prompt, greedy(5), use_tqdm=False)
    expected = reference(checkpoint, prompt, 5)
    assert output["token_ids"] == output.outputs[0].token_ids == expected
    assert output["text"] == output.outputs[0].text == ""  # no tokenizer
    assert output.outputs == [CompletionOutput(0, "", expected, "length")]
    assert output.outputs[0].finished() and not CompletionOutput(0, "", [], None).finished()
    assert (output.prompt, output.prompt_token_ids, output.finished) == (None, prompt, True)
    assert (first.num_cached_tokens, output.num_cached_tokens) == (0, 32)
    assert output.request_id > first.request_id
    assert {**output} == {
        "request_id": output.request_id,
        "prompt": None,
        "text": "",
        "token_ids": expected,
        "finish_reason": "length",
        "num_prompt_tokens": 40,
        "num_generated_tokens": 5,
        "num_cached_tokens": 32,
        "error": None,
    }
    assert "text" in output and "logprobs" not in output and len(output) == len([*output]) == 9
    assert (output.get("token_ids"), output.get("logprobs", 7)) == (expected, 7)
    for key in ("logprobs", "prompts", 0, None):
        with pytest.raises(KeyError, match="the keys are request_id, prompt, text"):
            output[key]


def test_repr_says_what_it_is_in_a_line(checkpoint, monkeypatch):
    path, facts = repr(str(checkpoint)), "float32 on cpu, torch attention, 32 blocks of 16"
    with LLM(checkpoint, **SMALL) as llm:
        assert repr(llm) == f"LLM({path}, Qwen3ForCausalLM, {facts})"
    assert repr(llm) == f"LLM({path}, Qwen3ForCausalLM, {facts}, closed)"
    engine = AsyncLLM(checkpoint, **SMALL)
    assert repr(engine) == f"AsyncLLM(LLM({path}, Qwen3ForCausalLM, {facts}))"
    engine.shutdown()
    assert repr(engine).endswith(f"{facts}, closed))")
    # half built: with nothing, then where the executor fails
    assert [repr(object.__new__(kind)) for kind in (LLM, AsyncLLM)] == ["LLM()", "AsyncLLM()"]
    built = []

    def fail(self):
        built.append(self)
        raise MemoryError

    monkeypatch.setattr(llm_engine.LLMEngine, "_start", fail)
    with pytest.raises(MemoryError):
        LLM(checkpoint, **SMALL)
    assert repr(built[0]) == f"LLM({path}, Qwen3ForCausalLM, closed)"


def test_names_of_vllm(llm):
    assert llm.llm_engine is llm
    assert llm.llm_engine.get_tokenizer() is llm.llm_engine.tokenizer
    with pytest.raises(AttributeError, match=r"no `get_metrics`: call metrics\(\)"):
        llm.get_metrics()
    with pytest.raises(AttributeError, match=r"LLM has no `add_lora`: load_adapter\(\) merges"):
        llm.llm_engine.add_lora(None)
    for name in ("update_weight_version", "remove_lora", "list_loras"):
        with pytest.raises(AttributeError, match=f"LLM has no `{name}`: "):
            getattr(llm.llm_engine, name)
    with pytest.raises(AttributeError, match=r"pass tensors to update_weights\(\), or what"):
        llm.init_weight_transfer_engine({"init_info": {}})
    for name in ("get_metrics", "init_weight_transfer_engine", "reload_weights", "collective_rpc"):
        assert not hasattr(llm, name)
    with pytest.raises(TypeError, match="no option `is_checkpoint_format`; tensors have the"):
        llm.start_weight_update(is_checkpoint_format=False)
    assert "max_num_seqs: int = 512" in pydoc.render_doc(LLM)  # which asks for every attribute
    llm.shutdown()
    assert llm.is_closed
    llm.shutdown()


@pytest.mark.parametrize("eos", [258, 256], ids=["of-tokenizer", "of-generation-config"])
def test_every_eos_id_stops_and_stays_in_token_ids(eos, tmp_path, monkeypatch):
    """Defect 7: the union of the tokenizer's id and all of generation_config.json."""
    path = copy_checkpoint(TINY, tmp_path / "model")
    edit_json(path / "generation_config.json", eos_token_id=[256, 65])
    with LLM(path, **SMALL) as llm:
        assert llm.eos_token_ids == {258, 256, 65}
        script = [ord("h"), ord("i"), eos, ord("!")]

        def scripted(scheduled, known):
            tokens = [script[i.seq.num_completion_tokens] for i in scheduled if i.samples]
            return PendingTokens(torch.tensor(tokens))

        monkeypatch.setattr(llm.executor, "run", scripted)
        [stopped] = llm.generate("a", greedy(9), use_tqdm=False)
        assert stopped.outputs == [CompletionOutput(0, "hi", script[:3], "stop")]
        [ignored] = llm.generate("a", greedy(4, ignore_eos=True), use_tqdm=False)
        assert ignored.outputs == [CompletionOutput(0, "hi!", script, "length")]
        assert_idle(llm)


@pytest.mark.parametrize("form", ["list", "number", "config"])
def test_eos_of_the_files_stops_a_real_run(form, checkpoint, tmp_path):
    expected = reference(checkpoint, PROMPT, 20)
    eos = expected[3]
    path = copy_checkpoint(checkpoint, tmp_path / "model")
    ids = {"list": [1, eos], "number": eos, "config": None}[form]
    edit_json(path / "generation_config.json", eos_token_id=ids)
    edit_json(path / "config.json", eos_token_id=eos if form == "config" else 1)
    with LLM(path, **SMALL) as llm:
        assert llm.eos_token_ids == ({1, eos} if form == "list" else {eos})
        [output] = llm.generate(PROMPT, greedy(20), use_tqdm=False)
        assert output["token_ids"] == expected[: expected.index(eos) + 1]
        assert output.outputs[0].finish_reason == "stop"


def test_progress_is_silent_or_shows_rates(llm, capfd):
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate(PROMPTS, PARAMS)
    out, err = capfd.readouterr()
    assert out == ""
    for part in ("5/5", "input=", "output=", "tok/s"):
        assert part in err


def test_directory_without_tokenizer_takes_ids_and_refuses_text(llm, checkpoint):
    assert llm.get_tokenizer() is None
    with pytest.raises(ValueError, match=r"`prompts` is text, .* no tokenizer: pass token ids"):
        llm.generate("text")
    assert_usable(llm, checkpoint)


def test_metrics_explain_a_run(llm):
    """Defect 19: what took effect, and what it did."""
    llm.generate(PROMPTS[:3], greedy(4), use_tqdm=False)
    metrics = llm.metrics()
    prefill, decode, steps = (metrics.pop(f"{n}_seconds") for n in ("prefill", "decode", "step"))
    assert 0 < max(prefill, decode) < steps < prefill + decode
    assert {k: metrics.pop(k)["count"] for k in vars(Latencies())} == {
        "prefill_step_seconds": 2,
        "decode_step_seconds": 4,
        "queue_seconds": 3,
        "first_token_seconds": 3,
        "seconds_per_token": 3,
        "total_seconds": 3,
    }
    assert metrics == {
        "attention_backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "adapter": "none",
        "kv_cache_dtype": "float32",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "weight_version": 0,
        "all_reduce": "none",
        "cuda_graphs": 0,
        "max_num_seqs": 8,
        "num_graph_replays": 0,
        "num_shared_prefix_steps": 0,
        "num_kernels_compiling": 0,
        "num_kvcache_blocks": 32,
        "num_used_kvcache_blocks": 0,
        "kvcache_usage": 0.0,
        "num_waiting": 0,
        "num_running": 0,
        "num_steps": 5,  # 115 prompt tokens at 64 a step, the second with decodes; 3 of decodes
        "num_prefill_tokens": 115,
        "num_decode_tokens": 3 * 3,
        "num_sampled_tokens": 3 * 4,
        "overlap": False,
        "num_finished": 3,
        "num_aborted": 0,
        "num_finished_by_stop": 0,
        "num_finished_by_length": 3,
        "num_finished_by_error": 0,
        "num_generated_tokens": 3 * 4,
        "num_prompt_tokens": 115,
        "num_cached_tokens": 0,
        "prefix_cache_hit_rate": 0.0,
        "num_preemptions": 0,
    }


def test_start_is_logged(checkpoint, caplog):
    """Defect 19: a slow run could not be explained, for the engine said nothing."""
    with caplog.at_level(logging.INFO, logger="nanovllm"), LLM(checkpoint, **SMALL):
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    weights, blocks, backend = lines
    assert weights.startswith("weights: Qwen3ForCausalLM, 0.00 GiB in float32 on cpu, loaded in ")
    assert blocks.startswith("KV cache: 32 blocks of 16 tokens (0.00 GiB), 4.0 sequences of 128 ")
    assert backend == "attention: torch (the one for CPUs); no CUDA graphs"


def count_calls(calls, function, *args):
    calls.append(args)
    return function(*args)


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_preemption_warns_once_and_changes_nothing(overlap, checkpoint, caplog, monkeypatch):
    """Defect 19: nothing told of it. Counted while it happens; one warning for each engine."""
    prompts, victims = [[i + 1] * 17 for i in range(4)], []
    expected = [reference(checkpoint, p, 40) for p in prompts]
    for engine in (1, 2):
        with LLM(checkpoint, overlap=overlap, **{**SMALL, "num_kvcache_blocks": 8}) as llm:
            # as if every request ended soon, so that too many are admitted
            monkeypatch.setattr(llm.scheduler.lengths, "remaining", lambda seq: 1)
            first = len(victims)
            wrapped = functools.partial(count_calls, victims, llm.scheduler.preempt)
            monkeypatch.setattr(llm.scheduler, "preempt", wrapped)
            for _ in range(2):
                before = len(victims)
                for prompt in prompts:
                    llm.add_request(prompt, greedy(40))
                done = {}
                while not llm.is_finished():
                    done.update((o.request_id, o["token_ids"]) for o in llm.step())
                    assert llm.metrics()["num_preemptions"] == len(victims) - first
                assert [done[i] for i in sorted(done)] == expected
                assert len(victims) > before + 1
                assert_idle(llm)
                llm.reset_prefix_cache()
            assert llm.metrics()["num_preemptions"] == len(victims) - first
        warnings = [r for r in caplog.records if "preempted" in r.getMessage()]
        assert [r.levelno for r in warnings] == [logging.WARNING] * engine


# -- step API -------------------------------------------------------------------------------------


def test_requests_finish_under_their_ids(llm, checkpoint):
    assert llm.step() == []
    ids = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):  # arriving while others run
        ids.append(llm.add_request(prompt, params))
        assert not llm.is_finished()
    assert len(set(ids)) == len(ids)
    assert run_steps(llm) == dict(zip(ids, references(checkpoint), strict=True))
    assert_idle(llm)
    default = llm.add_request(PROMPT)
    assert len(run_steps(llm)[default]) == SamplingParams().max_tokens


def test_completions_that_end_together_are_returned_once(llm):
    """A bug once: the request was returned for each completion that its last step ended."""
    params = SamplingParams(max_tokens=4, n=3)
    request_id = llm.add_request([10] * 4, params)  # no full block, so that all start at once
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [output.request_id for output in outputs] == [request_id]
    assert len(outputs[0].outputs) == 3


@pytest.mark.parametrize("num_steps", [0, rare(1), 2, rare(4)])
def test_abort_drops_one_request_only(num_steps, llm, checkpoint):
    """After no step all wait; then some run, the long prompt in its chunks."""
    for victim in range(len(PROMPTS)):
        ids = add_all(llm)
        done = run_steps(llm, num_steps)
        assert llm.abort(ids[victim]) is (ids[victim] not in done)
        assert llm.abort(ids[victim]) is False
        check_scheduler(llm.scheduler)
        done.update(run_steps(llm))
        others = {k: v for k, v in zip(ids, references(checkpoint), strict=True) if k in done}
        assert done == others
        assert set(ids) - set(done) <= {ids[victim]}
        assert_idle(llm)
    assert llm.abort(10**9) is False
    assert_usable(llm, checkpoint)


def test_generate_beside_queued_requests_is_refused(llm, checkpoint):
    request_id = llm.add_request(PROMPTS[2], PARAMS[2])
    for _ in range(2):  # waiting, then running
        before = llm.metrics()
        with pytest.raises(RuntimeError, match=r"add_request\(\) are left: finish .*abort_all"):
            llm.generate([PROMPT], use_tqdm=False)
        with pytest.raises(RuntimeError, match=r"reset_prefix_cache\(\) needs .* without requests"):
            llm.reset_prefix_cache()
        assert llm.metrics() == before
        assert llm.step() == []
    assert run_steps(llm) == {request_id: references(checkpoint)[2]}
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("use_tqdm", lambda llm: llm.generate([PROMPT], greedy(1), "yes")),
        ("use_tqdm", lambda llm: llm.score([PROMPT], use_tqdm=1)),
        ("use_tqdm", lambda llm: llm.embed([PROMPT], use_tqdm=None)),
        ("request_id", lambda llm: llm.abort("0")),
    ],
)
def test_arguments_of_the_wrong_type(name, call, llm):
    with pytest.raises(TypeError, match=f"`{name}` must be "):
        call(llm)
    assert_idle(llm)


def test_reset_prefix_cache_forgets(llm):
    cached = []
    for _ in range(2):
        cached += [llm.generate([9] * 40, greedy(2), False)[0].num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
    assert cached == [0, 32, 0, 32]
