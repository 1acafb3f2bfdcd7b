"""The engine under faults, in threads, beside others, and at its end."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from invariants import check_blocks, check_scheduler
from safetensors.torch import load_file

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    add_all,
    assert_usable,
    greedy,
    in_threads,
    make_checkpoint,
    reference,
    references,
    run_steps,
    run_until,
    tokens,
)
from faults import DEADLINE, FAULT_POINTS, fail_at, wait_until
from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.block_manager import Block
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.requests.request import Request


@pytest.fixture
def llm(either_llm):
    """Without and with overlap."""
    return either_llm


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "after", "error"),
    [
        pytest.param(1, False, KeyboardInterrupt(), id="first"),
        pytest.param(1, False, RuntimeError(), id="first-error", marks=pytest.mark.slow),
        pytest.param(3, False, KeyboardInterrupt(), id="third", marks=pytest.mark.slow),
        pytest.param(3, False, RuntimeError(), id="third-error", marks=pytest.mark.slow),
        pytest.param(3, True, KeyboardInterrupt(), id="after-third", marks=pytest.mark.slow),
        pytest.param(3, True, RuntimeError("out of memory"), id="after-third-error"),
    ],
)
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_generate_leaves_nothing_behind(point, k, after, error, llm, checkpoint, monkeypatch):
    """Defect 15: whatever is interrupted, and wherever."""
    with monkeypatch.context() as patch:
        calls = fail_at(patch, *FAULT_POINTS[point](llm), k, error, after=after)
        with pytest.raises(type(error)):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert len(calls) == k
    assert_usable(llm, checkpoint)


def test_ctrl_c_amid_a_reset_of_the_cache(llm, checkpoint, monkeypatch):
    """Blocks and their index were of two times, and a prompt began with another's blocks."""
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with monkeypatch.context() as patch:
        num_reset = itertools.count()
        reset = Block.reset

        def interrupted(block):
            reset(block)
            if next(num_reset) == len(llm.scheduler.block_manager.blocks) // 2:
                signal.raise_signal(signal.SIGINT)

        patch.setattr(Block, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.reset_prefix_cache()
        assert next(num_reset) == len(llm.scheduler.block_manager.blocks)
    check_blocks(llm.scheduler.block_manager, [])
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("k", [1, 2, pytest.param(3, marks=pytest.mark.slow), 6])
def test_failed_step_can_be_repeated(k, error, llm, checkpoint, monkeypatch):
    ids = add_all(llm)
    calls = fail_at(monkeypatch, llm.model_runner, "launch", k, error, after=True)
    done = run_steps(llm, k - 1)
    with pytest.raises(type(error)):
        llm.step()
    assert len(calls) == k
    check_scheduler(llm.scheduler)
    assert not llm.is_finished()
    done.update(run_steps(llm))
    assert done == dict(zip(ids, references(checkpoint), strict=True))
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize(
    ("point", "k", "after"),
    [("deallocate", 3, True), ("allocate", 1, True), ("publish", 1, True), ("take", 5, False)],
)
def test_interrupted_step_gives_no_wrong_results(point, k, after, llm, checkpoint, monkeypatch):
    """Ctrl-C within the books: requests may be dropped, but not answered wrongly or half kept."""
    ids = add_all(llm)
    with monkeypatch.context() as patch:
        fail_at(patch, *FAULT_POINTS[point](llm), k, KeyboardInterrupt(), after=after)
        done = run_until(KeyboardInterrupt, llm)
    done.update(run_steps(llm))
    expected = dict(zip(ids, references(checkpoint), strict=True))
    assert done == {i: expected[i] for i in done}
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_interrupted_wait_loses_nothing(k, monkeypatch):
    """Most of the time Ctrl-C hits a wait; controls that follow the last tokens come after it."""
    params = SamplingParams(temperature=0, max_tokens=6, bad_words=["45"], ignore_eos=True)
    with LLM(TINY, overlap=True, **SMALL) as llm:
        [expected] = tokens(llm.generate(["17+4="], params, False))
        assert expected != tokens(llm.generate(["17+4="], greedy(6, ignore_eos=True), False))[0]
        request_id = llm.add_request("17+4=", params)
        fail_at(monkeypatch, llm.executor, "wait", k, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_steps(llm)
        assert run_steps(llm) == {request_id: expected}


def test_interrupted_output_loses_nothing(llm, checkpoint, monkeypatch):
    ids = [llm.add_request(PROMPT, greedy(3)) for _ in range(2)]
    fail_at(monkeypatch, Request, "output", 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_steps(llm)
    assert not llm.is_finished()
    assert run_steps(llm) == dict.fromkeys(ids, reference(checkpoint, PROMPT, 3))


def test_requests_of_a_failed_step_can_be_aborted(llm, checkpoint, monkeypatch):
    ids = add_all(llm)
    with monkeypatch.context() as patch:
        fail_at(patch, llm.model_runner, "launch", 1, RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.step()
    assert all(llm.abort(i) for i in ids)
    assert_usable(llm, checkpoint)


# -- threads --------------------------------------------------------------------------------------


def test_threads_take_turns(llm, checkpoint):
    """More threads than turns, some of them refused: right results, no deadlock."""
    results = {}

    def work(i):
        for turn in range(4):
            prompts = [[i + 1, turn, *PROMPT], [turn + 1] * (i + 15)]
            results[i, turn] = (prompts, tokens(llm.generate(prompts, greedy(5), False)))
            llm.metrics()
            with pytest.raises(ValueError, match="at least one token"):
                llm.generate([PROMPT, []])
            assert not llm.abort(10**9)

    in_threads(6, work)
    assert len(results) == 6 * 4
    for prompts, found in results.values():
        assert found == [reference(checkpoint, p, 5) for p in prompts]
    assert_usable(llm, checkpoint)


def test_exit_waits_for_the_calls_before_it_only(llm, monkeypatch):
    """It took 29 s beside three threads that called `generate` in a loop."""
    served, add = [], llm.core.add

    def noted(request):
        served.append(request.prompt_token_ids)
        add(request)

    def calls(prompt):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            while True:
                llm.generate(prompt, greedy(2), use_tqdm=False)

    monkeypatch.setattr(llm.core, "add", noted)
    prompts = [[i + 1] * 5 for i in range(3)]
    threads = [threading.Thread(target=calls, args=(prompt,), daemon=True) for prompt in prompts]
    threads.append(threading.Thread(target=llm.exit, daemon=True))
    with llm._lock:
        for thread in threads:
            last = llm._lock._last
            thread.start()
            wait_until(lambda last=last: llm._lock._last is not last)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "hangs"
    assert served == prompts


def test_two_engines_in_two_threads(checkpoint, tmp_path):
    paths = [checkpoint, make_checkpoint(tmp_path / "other", seed=1)]
    results = {}

    def work(path):
        with LLM(path, **SMALL) as llm:
            results[path] = [tokens(llm.generate(PROMPTS, PARAMS, False)) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for path in paths:
        assert results[path] == [references(path)] * 5


# -- life and death -------------------------------------------------------------------------------


def test_engines_interleave(checkpoint, tmp_path):
    """Each keeps its own blocks, weights and metadata of the step, down to another shape."""
    other = make_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=1, head_dim=16)
    paths = [checkpoint, other, checkpoint]
    sizes = [SMALL, {**SMALL, "kvcache_block_size": 32}, {**SMALL, "max_num_batched_tokens": 8}]
    engines = [LLM(p, **options) for p, options in zip(paths, sizes, strict=True)]
    done = [{} for _ in engines]
    for llm in engines:
        add_all(llm)
    while not all(llm.is_finished() for llm in engines):
        for llm, outputs in zip(engines, done, strict=True):
            outputs.update((o.request_id, o["token_ids"]) for o in llm.step())
    for path, outputs in zip(paths, done, strict=True):
        assert [outputs[i] for i in sorted(outputs)] == references(path)
    engines[0].exit()
    for path, llm in zip(paths[1:], engines[1:], strict=True):
        assert_usable(llm, path)


def test_closed_engine_says_so(checkpoint):
    with LLM(checkpoint, **SMALL) as llm:
        llm.add_request(PROMPT)
        llm.step()
    llm.exit()
    llm.exit()
    calls = {
        "generate": lambda: llm.generate([PROMPT]),
        "generate nothing": lambda: llm.generate([]),
        "add_request": lambda: llm.add_request(PROMPT),
        "step": llm.step,
        "is_finished": llm.is_finished,
        "abort": lambda: llm.abort(0),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "metrics": llm.metrics,
        "with": llm.__enter__,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match="this engine is closed: build a new LLM"):
            pytest.fail(f"{name} returned {call()!r}")
    with LLM(checkpoint, **SMALL) as llm:
        assert_usable(llm, checkpoint)


def test_context_manager_closes_after_an_error(checkpoint):
    with pytest.raises(KeyError, match="the caller's"), LLM(checkpoint, **SMALL) as llm:
        raise KeyError("the caller's")
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()


@pytest.mark.parametrize(
    "end", ["del", "exit", "exit with an error kept", "del with requests", "del after an error"]
)
def test_memory_comes_back(end, checkpoint, monkeypatch):
    """Defect 14: nothing but the caller holds the engine, so `del llm` frees it; nor do frames of
    an error that the caller keeps hold what `exit` frees.
    """
    llm = LLM(checkpoint, **SMALL)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    model = weakref.ref(llm.model_runner.model)
    runner = weakref.ref(llm.model_runner)
    cache = weakref.ref(llm.model_runner.model.model.layers[0].self_attn.attn.cache.k)
    if end == "del with requests":
        llm.add_request(PROMPT)
        llm.step()
    if end == "del after an error":
        with pytest.raises(ValueError, match="at least one token"):
            llm.generate([[]])
    kept = None
    if end == "exit with an error kept":
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as kept:
            patch.setattr(model_runner, "build_batch", lambda *_: 1 / 0)
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    if end.startswith("exit"):
        llm.exit()
        gc.collect()
    else:
        del llm
        gc.collect()
        assert runner() is None
    assert model() is None
    assert cache() is None
    assert (kept is not None) == (end == "exit with an error kept")


def test_failed_construction_leaves_nothing(checkpoint, monkeypatch):
    runners, ignored = [], []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)  # of __del__
    monkeypatch.setattr(
        "nanovllm.startup.builder.Builder.allocate_kv_cache",
        lambda self, *args: runners.append(weakref.ref(self)) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        LLM(checkpoint, **SMALL)
    gc.collect()
    assert [runner() for runner in runners] == [None]
    assert not ignored


ENDS = {
    "in a cycle": "llm.me = llm",
    "sys.exit": "sys.exit(0)",
    "in a daemon thread": """
def work():
    while True:
        llm.generate([[1], [2]], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
        started.set()
started = threading.Event()
threading.Thread(target=work, daemon=True).start()
started.wait()
""",
}


@pytest.mark.slow  # test_config.py has a usual one
@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_forgets_exit_ends_cleanly(end, checkpoint):
    """Engines close before Python tears modules down; a thread in a step aborted the process."""
    code = f"""
import atexit, sys, threading
atexit.register(lambda: print(len(vars(runner).keys() & {{"built"}}), "left"))
from nanovllm import LLM, SamplingParams
llm = LLM({str(checkpoint)!r}, overlap=True, **{SMALL})
runner = llm.model_runner
print(len(llm.generate([1, 2, 3], use_tqdm=False)))
{ENDS[end]}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "left"]
    assert "thread" in end or done.stderr == ""


FORKED = """
import gc, os, sys, threading
from nanovllm import LLM, TINY, BeamSearchParams, SamplingParams
llm = LLM(TINY, **{options})
stream = llm.stream("a", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
first = next(stream)
calls = {{
    "generate": lambda: llm.generate("a"),
    "stream": lambda: llm.stream("a"),
    "a stream goes on": lambda: next(stream),
    "chat": lambda: llm.chat([{{"role": "user", "content": "a"}}]),
    "score": lambda: llm.score("a"),
    "embed": lambda: llm.embed("a"),
    "beam_search": lambda: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2)),
    "add_request": lambda: llm.add_request("a"),
    "step": llm.step,
    "is_finished": llm.is_finished,
    "abort": lambda: llm.abort(0),
    "abort_all": llm.abort_all,
    "reset_prefix_cache": llm.reset_prefix_cache,
    "metrics": llm.metrics,
    "with": llm.__enter__,
}}
held, leave = threading.Event(), threading.Event()
def hold():
    with llm._lock:
        held.set()
        leave.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    for name, call in calls.items():
        try:
            print(name, "returned", call(), flush=True)
        except RuntimeError as error:
            assert "a forked process" in str(error), error
    assert not llm.is_closed
    {end}
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
leave.set()
print(sum(len(output["token_ids"]) for output in (first, *stream)), "tokens")
llm.exit()
"""


@pytest.mark.slow  # a replicated engine has test_forked_process_has_no_engine
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("end", ["", "llm.exit()", "del llm, stream, calls, call; gc.collect()"])
def test_a_forked_child_is_told_so(end):
    """`generate` hung: it waited for threads of PyTorch and for locks of others, which it lacks.
    What it does, and its end, leave the parent's engine alone.
    """
    code = FORKED.format(options=SMALL, end=end)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "child 7\n5 tokens\n"), done.stderr


def test_failure_after_the_model_is_built_gives_its_memory_back(checkpoint, monkeypatch):
    runners = []
    exit_runner = ModelRunner.exit
    monkeypatch.setattr(ModelRunner, "exit", lambda self: runners.append(1) or exit_runner(self))
    monkeypatch.setattr("nanovllm.engine.assembly.Scheduler", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM(checkpoint, **SMALL)
    gc.collect()
    assert runners == [1]


def test_exit_lets_go_of_the_model(checkpoint):
    """Of its memory, too, while somebody still has the engine."""
    llm = LLM(checkpoint, **SMALL, enable_sleep_mode=True)
    llm.update_weights(load_file(Path(checkpoint) / "model.safetensors"))
    llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    model = weakref.ref(llm.model_runner.model)
    llm.exit()
    assert model() is None
