"""Steps under way: what ends, is aborted or is interrupted while the device computes for it."""

import gc
import itertools
import signal
import time
import weakref

import pytest
from invariants import check_scheduler

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    VOCAB,
    add_all,
    assert_idle,
    assert_usable,
    copy_checkpoint,
    edit_json,
    greedy,
    interrupt_after_launch,
    rare,
    reference,
    references,
    run_steps,
)
from faults import Interrupt
from nanovllm import LLM


@pytest.fixture
def llm(either_llm):
    """Without and with overlap."""
    return either_llm


# -- one step late --------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "pool"), [(64, 32), rare(64, 9), rare(8, 32), (8, 9)])
def test_an_end_noticed_late_changes_nothing(budget, pool, checkpoint, tmp_path):
    """The step after the one that sampled EOS is under way already: its token is dropped."""
    prompts = [[i, 2 * i + 1, 60 - i] * (i + 1) for i in range(10)]
    lengths = [1, 2, 30, 30, 3, 30, 30, 30, 12, 30]
    wanted = [reference(checkpoint, p, n) for p, n in zip(prompts, lengths, strict=True)]
    eos = [wanted[2][4], wanted[5][9]]
    path = copy_checkpoint(checkpoint, tmp_path / "model")
    edit_json(path / "generation_config.json", eos_token_id=eos)
    results, num_decodes = [], []
    for overlap in (False, True):
        options = {**SMALL, "num_kvcache_blocks": pool, "max_num_batched_tokens": budget}
        with LLM(path, overlap=overlap, **options) as llm:
            outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
            assert_idle(llm)
            assert not llm.core.in_flight
            num_decodes.append(llm.metrics()["num_decode_tokens"])
            results.append([(o["token_ids"], o.outputs[0].finish_reason) for o in outputs])
    assert results[0] == results[1]
    for (found, reason), full in zip(results[0], wanted, strict=True):
        ends = [i + 1 for i, token in enumerate(full) if token in eos]
        assert found == full[: min([*ends, len(full)])]
        assert reason == ("stop" if ends else "length")
    stops = [reason for _, reason in results[0]].count("stop")
    assert 2 <= stops < 10
    assert num_decodes[1] > num_decodes[0], "no step was launched in vain, so nothing was late"


@pytest.mark.parametrize("victim", range(len(PROMPTS)))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_abort_while_its_step_is_under_way(victim, num_steps, checkpoint):
    with LLM(checkpoint, overlap=True, **SMALL) as llm:
        ids = add_all(llm)
        done = run_steps(llm, num_steps)
        under_way = [item.seq.seq_id for step in llm.core.in_flight for item in step.scheduled]
        assert under_way, "nothing is under way"
        late = llm.add_request(PROMPT[::-1], greedy(5))  # may get its blocks and slot
        assert llm.abort(ids[victim]) is (ids[victim] not in done)
        check_scheduler(llm.scheduler)
        done.update(run_steps(llm))
        wanted = dict(zip(ids, references(checkpoint), strict=True))
        wanted[late] = reference(checkpoint, PROMPT[::-1], 5)
        assert done == {i: wanted[i] for i in done}
        assert set(wanted) - set(done) <= {ids[victim]}
        assert_usable(llm, checkpoint)


def test_abort_of_everything_under_way(checkpoint):
    """The last step has nobody left to give its tokens to."""
    with LLM(checkpoint, overlap=True, **SMALL) as llm:
        ids = add_all(llm)
        done = run_steps(llm, 2)
        assert all(llm.abort(i) for i in ids if i not in done)
        assert llm.is_finished() and not llm.core.in_flight
        assert_usable(llm, checkpoint)
        assert llm.step() == []


def test_superfluous_step_is_forgotten(checkpoint):
    """A stop is seen a step late. What comes hours after it would count as that step's time."""
    [_, stop, *_] = reference(checkpoint, PROMPT, 2)
    with LLM(checkpoint, overlap=True, **SMALL) as llm:
        [output] = llm.generate([PROMPT], greedy(20, stop_token_ids=[stop]), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert not llm.core.in_flight
        assert_usable(llm, checkpoint)


@pytest.mark.parametrize("end", ["exit", "with", "del"])
def test_the_end_of_an_engine_with_a_step_under_way(end, checkpoint):
    """Defect 14: neither the step's tokens nor its sequences keep anything alive."""
    llm = LLM(checkpoint, overlap=True, **SMALL)
    add_all(llm)
    llm.step()
    assert llm.core.in_flight
    model, runner = weakref.ref(llm.model_runner.model), weakref.ref(llm.model_runner)
    if end == "exit":
        llm.exit()
        with pytest.raises(RuntimeError, match="closed"):
            llm.step()
    elif end == "with":
        with pytest.raises(KeyError, match="the caller's"), llm:
            raise KeyError("the caller's")
    else:
        del llm
        gc.collect()
        assert runner() is None
    assert model() is None


# -- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_defect_15_sigint_in_the_model(k, after, llm, checkpoint, monkeypatch):
    """The signal itself, in the main thread, while a step is launched."""
    run, calls = llm.model_runner.launch, itertools.count(1)

    def interrupted(*args):
        tokens = run(*args) if after else None
        if next(calls) == k:
            signal.raise_signal(signal.SIGINT)
        return tokens if after else run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert next(calls) == k + 1
    assert not llm.core.in_flight
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_defect_15_ctrl_c_inside_abort(num_steps, after, llm, checkpoint, monkeypatch):
    """Half an abort left blocks that nobody held and nobody could take."""
    ids = add_all(llm)
    done = run_steps(llm, num_steps)
    victim = next(i for i in ids if i not in done)
    deallocate = llm.scheduler.block_manager.deallocate

    def interrupted(seq):
        if after:
            deallocate(seq)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler.block_manager, "deallocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.abort(victim)
    check_scheduler(llm.scheduler)
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_defect_15_ctrl_c_between_launch_and_books(k, llm, checkpoint, monkeypatch):
    """The step had run and nobody noted it: repeated, it read the tokens that it had written."""
    ids = add_all(llm)
    done = interrupt_after_launch(monkeypatch, llm, k)
    done.update(run_steps(llm))
    assert done == dict(zip(ids, references(checkpoint), strict=True))
    assert_usable(llm, checkpoint)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("by", "times"),
    [
        pytest.param("generate", 150, marks=SLOW),
        ("steps", 25),
        pytest.param("steps", 150, marks=SLOW),
    ],
)
def test_defect_15_ctrl_c_at_any_line(by, times, llm, checkpoint):
    """Wherever it hits: no wrong result, nothing half done, and the engine stays usable."""
    prompts = [PROMPTS[0], [VOCAB - 1] * 20, PROMPTS[3]]
    wanted = {tuple(p): reference(checkpoint, p, 4) for p in prompts}

    def work(done):
        outputs = []
        if by == "generate":
            outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
        for prompt in prompts if by == "steps" else ():
            llm.add_request(prompt, greedy(4))
        finish(done, outputs)

    def finish(done, outputs=()):
        done.update((tuple(o.prompt_token_ids), o["token_ids"]) for o in outputs)
        while not llm.is_finished():
            done.update((tuple(o.prompt_token_ids), o["token_ids"]) for o in llm.step())

    for _ in range(3):  # the last finds prefixes in the cache, and layouts: it is the shortest
        with Interrupt(float("inf")) as whole:
            work({})
    for k in range(1, whole.count, whole.count // times):
        done = {}
        with pytest.raises(KeyboardInterrupt), Interrupt(k):
            work(done)
        assert by == "steps" or llm.is_finished(), "generate left requests"
        finish(done)  # steps may go on with what is left
        assert done == {prompt: wanted[prompt] for prompt in done}
        assert_usable(llm, checkpoint)


@pytest.mark.parametrize("every", [9, rare(1)])
def test_defect_15_ctrl_c_at_any_call_of_a_stream(every, llm, checkpoint):
    """A stream that begins and is left, interrupted anywhere, leaves no request. By calls (each, or
    every ninth), since lines would be too strict: Python raises it when a function begins, or goes
    round a loop.
    """

    def work():
        stream = llm.stream([PROMPTS[0], [VOCAB - 1] * 20], greedy(3))
        next(stream)
        stream.close()

    for k in itertools.count(1, every):
        try:
            with Interrupt(k, "call"):
                work()
            break  # there are no more calls
        except KeyboardInterrupt:
            assert_usable(llm, checkpoint)
    assert k > 100
    assert_usable(llm, checkpoint)


def test_step_times_include_the_work(llm, monkeypatch):
    """Rates were a hundred times too high where launching a step is computing it, as on a CPU."""
    run, launching = llm.model_runner.launch, []

    def timed(*args):
        start = time.perf_counter()
        tokens = run(*args)
        launching.append(time.perf_counter() - start)
        return tokens

    monkeypatch.setattr(llm.model_runner, "launch", timed)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.step() == []  # books what overlap has left under way
    metrics = llm.metrics()
    assert metrics["num_steps"] == len(launching) > 5
    slack = 1 - 1e-9  # of adding up in another order
    assert metrics["step_seconds"] >= max(launching) * slack
    if not metrics["overlap"]:
        assert metrics["step_seconds"] >= sum(launching) * slack
