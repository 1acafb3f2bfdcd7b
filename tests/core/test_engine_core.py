"""The engine's loop on a fake device: failed launches, interrupts, and what is left and taken."""

import random
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from host import FakeModel, make_scheduler, make_seq, reference
from invariants import check_scheduler

from nanovllm.arrivals.waiting_core import WaitingCore
from nanovllm.engine.core import Core
from nanovllm.engine.engine_core import EngineCore
from nanovllm.engine.sequence import ScheduledSequence, Sequence
from nanovllm.replicas.replicated_core import ReplicatedCore
from nanovllm.requests.request import Request


class Tokens(NamedTuple):
    """Sampled tokens of a step, with nothing else."""

    token_ids: list[int]
    extras: None = None


class FakeExecutor:
    """Runs `FakeModel`. Calls of `run` whose numbers are in `fails` raise before they launch."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.num_calls, self.fails = model, 0, set[int]()
        self.interrupts = set[int]()  # calls of `wait`
        self.num_waits = 0

    def run(self, scheduled: list[ScheduledSequence], known: Any) -> Tokens:
        self.num_calls += 1
        if self.num_calls in self.fails:
            raise RuntimeError("injected")
        return Tokens(self.model.run(scheduled))

    def wait(self, tokens: Tokens) -> list[int]:
        self.num_waits += 1
        if self.num_waits in self.interrupts:
            raise KeyboardInterrupt
        return tokens.token_ids


class Engine:
    """A core, and its parts."""

    def __init__(self, lookahead: int) -> None:
        self.scheduler = make_scheduler(num_blocks=8, max_num_seqs=3)
        self.executor = FakeExecutor(FakeModel(self.scheduler))
        self.core = EngineCore(self.executor, self.scheduler, lookahead)  # type: ignore[arg-type]
        self.num_requests = 0

    def add(self, *lengths: int, listener: Any = None) -> Request:
        """A request with prompts of these lengths."""
        seqs = [make_seq(n, max_tokens=6) for n in lengths]
        for seq in seqs:
            seq.request_id = self.num_requests
        tokens = seqs[0].prompt_token_ids
        params = seqs[0].sampling_params
        request = Request(self.num_requests, None, tokens, params, seqs, listener)
        self.num_requests += 1
        self.core.add(request)
        return request

    def finish(self, *requests: Request) -> None:
        """Run to the end: the right tokens, all of them to be taken, and nothing left."""
        while self.core.requests:
            self.core.step()
            check_scheduler(self.scheduler)
        assert sorted(r.request_id for r in self.core.finished) == [r.request_id for r in requests]
        for request in requests:
            for seq in request.seqs:
                wanted = reference(seq, self.scheduler.max_model_len)
                assert (seq.completion_token_ids, seq.finish_reason) == wanted
        assert not self.core.is_idle(), "there are some to be taken"
        self.core.forget_finished()
        assert self.core.is_idle() and not self.core.in_flight
        assert self.scheduler.block_manager.num_used_blocks == 0


@pytest.fixture(params=[0, 1], ids=["synchronous", "overlap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_a_failed_launch_is_repeated_when_all_is_booked(engine: Engine, call: int) -> None:
    """The host knows the inputs of the repeated step only when the others are booked."""
    engine.executor.fails = {call}
    requests = [engine.add(n) for n in (5, 9, 2, 7)]
    with pytest.raises(RuntimeError, match="injected"):
        while True:
            engine.core.step()
    assert engine.executor.num_calls == call
    if engine.core.in_flight:
        engine.core.step()
        assert not engine.core.in_flight
        assert engine.executor.num_calls == call, "launched before all was booked"
    engine.finish(*requests)
    assert engine.core.metrics.num_steps == engine.executor.num_calls - 1


@pytest.mark.parametrize("wait", [1, 3])
def test_after_ctrl_c_in_a_wait_the_step_is_booked_first(engine: Engine, wait: int) -> None:
    engine.executor.interrupts = {wait}
    requests = [engine.add(n) for n in (5, 9, 2)]
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.core.step()
    num_calls, lookahead = engine.executor.num_calls, len(engine.core.in_flight) - 1
    engine.core.step()
    assert engine.executor.num_calls == num_calls, "launched one more"
    assert len(engine.core.in_flight) in (0, lookahead)
    engine.finish(*requests)
    assert engine.core.metrics.num_steps == engine.executor.num_calls


def test_what_is_done_meanwhile_is_done_behind_the_launch_and_before_the_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device computes then, and the host has time."""
    calls: list[str] = []
    for name in ("run", "wait"):
        call = getattr(engine.executor, name)
        monkeypatch.setattr(
            engine.executor, name, lambda *a, name=name, call=call: calls.append(name) or call(*a)
        )
    engine.core.meanwhile = lambda: calls.append("meanwhile")
    request = engine.add(5)
    steps = []
    while engine.core.requests:
        engine.core.step()
        steps.append(tuple(calls))
        calls.clear()
    whole = ("run", "meanwhile", "wait")
    assert whole in steps
    assert set(steps) <= {whole, ("run", "meanwhile"), ("meanwhile", "wait")}
    engine.finish(request)


def test_others_have_their_turn_while_a_device_computes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a launch may be the computation itself, they always have it."""
    free: dict[str, list[bool]] = {"run": [], "wait": [], "meanwhile": [], "listener": []}

    def note(name: str) -> None:
        free[name].append(engine.core.turn.wait(0))

    for name in ("run", "wait"):
        call = getattr(engine.executor, name)
        monkeypatch.setattr(
            engine.executor, name, lambda *a, name=name, call=call: note(name) or call(*a)
        )
    engine.core.meanwhile = lambda: note("meanwhile")
    engine.executor.fails = {3}
    for n in (5, 9):
        engine.add(n, listener=lambda _: note("listener"))
    while engine.core.requests:
        with suppress(RuntimeError):  # a launch that fails leaves it to the others, too
            engine.core.step()
        assert engine.core.turn.wait(0)
    is_shared = bool(engine.core.describe()["overlap"])
    assert set(free["wait"]) == {True}
    for name in ("run", "meanwhile", "listener"):
        assert set(free[name]) == {not is_shared}, name


def test_a_hold_that_fails_leaves_the_turn_to_the_others() -> None:
    def fail(output: Any) -> None:
        raise RuntimeError("injected")

    core = (engine := Engine(1)).core
    engine.add(5, listener=fail)
    core.step()
    assert core.in_flight
    with pytest.raises(RuntimeError, match="injected"):
        core.hold()
    assert core.turn.wait(0)


def test_half_a_request_is_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two of its sequences: it could neither finish nor be aborted."""
    add, calls = engine.scheduler.add, []

    def interrupted(seq: Any) -> None:
        calls.append(seq)
        if len(calls) == 2:
            raise KeyboardInterrupt
        add(seq)

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add(5, 3)
    assert engine.core.is_idle() and not engine.core.requests
    engine.finish(engine.add(5, 3))


def test_what_is_left_goes_before_anything_else(engine: Engine) -> None:
    stays, goes = engine.add(5, 3), engine.add(2)
    engine.core.step()
    engine.core.abort_later({goes.request_id, 99})
    assert engine.core.describe()["num_aborted"] == 1
    engine.finish(stays)
    goes = engine.add(3)
    engine.core.abort_later({goes.request_id})
    assert engine.core.is_idle()


def test_listeners_are_told_and_others_are_kept(engine: Engine) -> None:
    """A listener's request is not among those to be taken; an abort of all drops these, too."""
    news: list[Any] = []
    heard, kept = engine.add(5, listener=news.append), engine.add(3)
    while heard.request_id in engine.core.requests:
        engine.core.step()
    assert [token for output in news for token in output.outputs[0].token_ids] == (
        heard.seqs[0].completion_token_ids
    )
    assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    assert engine.core.finished == [kept]
    engine.add(4)
    engine.core.abort_all()
    assert engine.core.is_idle() and not engine.core.requests
    assert engine.core.metrics.num_aborted == 1


@pytest.mark.parametrize("order", ["oldest first", "youngest first", "any"])
def test_an_abort_looks_at_few_sequences(
    engine: Engine, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 aborts took 13 s: each searched the queue. Counts whatever is asked of a sequence."""
    num_looks = 0

    class Watched(Sequence):
        __slots__ = ()
        __hash__ = object.__hash__

        def __getattribute__(self, name: str) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().__getattribute__(name)

        def __eq__(self, other: object) -> bool:
            nonlocal num_looks
            num_looks += 1
            return self is other

    def looks_per_abort(count: int) -> float:
        requests = [engine.add(5) for _ in range(count)]
        for _ in range(2):
            engine.core.step()
        victims = requests[:-1][:: 1 if order == "oldest first" else -1]
        if order == "any":
            random.Random(0).shuffle(victims)
        before = num_looks
        for request in victims:
            assert engine.core.abort([request.request_id]) == 1
        looks = (num_looks - before) / len(victims)
        assert list(engine.core.requests.values()) == requests[-1:]
        assert engine.core.describe()["num_waiting"] == 1
        engine.finish(requests[-1])
        return looks

    monkeypatch.setattr("host.Sequence", Watched)
    few, many = looks_per_abort(50), looks_per_abort(2000)
    assert 0 < many < 1.5 * few


def test_a_core_around_a_core_passes_all_on():
    """Ctrl-C did not end the wait for a replica that starts, if the model sees."""
    methods = {
        name
        for core in (EngineCore, ReplicatedCore)
        for name in vars(core).keys() & set(dir(Core))
        if not name.startswith("__")
    }
    assert "prepare_to_hold" in methods
    assert methods <= vars(WaitingCore).keys()
