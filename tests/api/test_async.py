"""`AsyncLLM`: coroutines that share an engine, and how requests and engines end."""

import asyncio
import contextlib
import gc
import itertools
import os
import queue
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from invariants import check_scheduler

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    assert_usable,
    facts,
    gather,
    greedy,
    make_checkpoint,
    rare,
    reference,
    references,
)
from faults import FAULT_POINTS, fail_at
from nanovllm import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanovllm.async_llm import COMPILING_FORMS, WAKE_AT_ONCE, _Jobs, _Mailbox, _serve, _Waker
from nanovllm.llm import POOLING
from nanovllm.requests.news import News
from nanovllm.sampling.structured_output import GrammarCompiler

PATIENCE = 60  # seconds, for what would hang for ever
# Requests without an end take some seconds, so that they run still when a loop comes late.
LONG = {**SMALL, "num_kvcache_blocks": 600, "max_model_len": 4096}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("long")
    return make_checkpoint(path, max_position_embeddings=LONG["max_model_len"])


class Hall:
    """An `AsyncLLM` whose engine tests can look at. Its steps can be made to wait."""

    def __init__(self, path, monkeypatch, *, device="cpu", **options):
        found, begin = [], _Jobs.__init__

        def begun(jobs, llm):
            found.append(llm)
            description = llm._describe() | {"device": device}
            llm._describe = lambda: description
            begin(jobs, llm)
            ready.set()

        ready = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(_Jobs, "__init__", begun)
            self.async_llm = AsyncLLM(path, **LONG, **options)
            assert ready.wait(PATIENCE)
        self.llm = found[0]

    async def metrics(self):
        return await asyncio.wait_for(self.async_llm.metrics(), PATIENCE)

    async def assert_idle(self):
        """Check that nothing is left: earlier calls are done when `metrics` answers."""
        metrics = await self.metrics()
        left = {k: metrics[k] for k in ("num_used_kvcache_blocks", "num_waiting", "num_running")}
        assert not any(left.values()), left
        check_scheduler(self.llm.scheduler)


@pytest.fixture(params=[rare(False), True], ids=["synchronous", "overlap"])
def hall(request, checkpoint, monkeypatch):
    hall = Hall(checkpoint, monkeypatch, overlap=request.param)
    yield hall
    hall.async_llm.exit()
    assert not hall.async_llm._thread.is_alive()


async def collect(async_llm, prompt, params=None):
    """All that a request gives."""

    async def all_of():
        return [output async for output in async_llm.stream(prompt, params)]

    return await asyncio.wait_for(all_of(), PATIENCE)


async def tokens_of(async_llm, prompt, params=None):
    outputs = await collect(async_llm, prompt, params)
    return [token for output in outputs for token in output["token_ids"]]


async def assert_usable_async(hall, path):
    assert await tokens_of(hall.async_llm, PROMPT, greedy(6)) == reference(path, PROMPT, 6)
    await hall.assert_idle()


# -- the work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_many_at_once_as_generate(overlap):
    """More than run at once, random bytes, stop strings, several completions, text prompts."""
    prompts = ["a", [7] * 20, "日本", list(range(90))] * 6
    params = [
        SamplingParams(
            temperature=3.0, ignore_eos=True, seed=i, max_tokens=5 + i, n=1 + i % 2, stop=["e", "1"]
        )
        for i in range(len(prompts))
    ]
    with LLM(TINY, **SMALL) as llm:
        wholes = [[facts(c) for c in o.outputs] for o in llm.generate(prompts, params, False)]

    async def main():
        async with AsyncLLM(TINY, overlap=overlap, **SMALL) as async_llm:
            work = [collect(async_llm, *item) for item in zip(prompts, params, strict=True)]
            found = [gather(outputs) for outputs in await asyncio.gather(*work)]
            assert [own.popitem()[1] for own in found] == wholes
            metrics = await async_llm.metrics()
            assert metrics["num_finished"] == len(params)
            # they shared steps
            assert metrics["num_steps"] < metrics["num_decode_tokens"] / 2

    asyncio.run(main())
    assert {"stop", "length"} == {done[3] for one in wholes for done in one}


def test_generate_gives_all_there_is(hall, checkpoint):
    """Each output begins with the one before; the last is that of `LLM.generate`."""
    params = SamplingParams(seed=3, n=2, max_tokens=9, logprobs=2, ignore_eos=True)
    with LLM(checkpoint, **SMALL) as llm:
        [whole] = llm.generate([PROMPT], params, use_tqdm=False)

    async def all_of():
        return [output async for output in hall.async_llm.generate(PROMPT, params)]

    async def main():
        outputs = await asyncio.wait_for(all_of(), PATIENCE)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            for old, new in zip(before.outputs, after.outputs, strict=False):
                assert new.text.startswith(old.text) and new.index == old.index
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        for found, wanted in zip(outputs[-1].outputs, whole.outputs, strict=True):
            assert facts(found) == facts(wanted)
            assert list(found.logprobs) == list(wanted.logprobs)
            assert found.cumulative_logprob == wanted.cumulative_logprob
        async with contextlib.aclosing(hall.async_llm.generate(PROMPT, params)) as left:
            await anext(left)
        await hall.assert_idle()

    asyncio.run(main())


def test_chats_scores_and_vectors_are_those_of_the_llm():
    """All at once, beside each other, by the same queue."""
    ask, text = [{"role": "user", "content": "127+345="}], "127+345=472"
    with LLM(TINY, **SMALL) as llm:
        [chat] = llm.chat(ask, greedy(9), use_tqdm=False)
        [score] = llm.score(text, use_tqdm=False)
        [judged] = llm.classify(text, ["4", ord("5"), "6"], use_tqdm=False)
        wanted = [
            llm.embed(text, kind, normalize=kind == "last", use_tqdm=False)[0] for kind in POOLING
        ]

    async def main():
        async with AsyncLLM(TINY, **SMALL) as async_llm:

            async def talk():
                return [output async for output in async_llm.chat(ask, greedy(9))]

            found = await asyncio.gather(
                talk(),
                async_llm.score(text),
                *(async_llm.embed(text, kind, normalize=kind == "last") for kind in POOLING),
                async_llm.render(ask),
                async_llm.classify(text, ["4", ord("5"), "6"]),
            )
            with pytest.raises(ValueError, match="`pooling` must be"):
                await async_llm.embed(text, "first")
            with pytest.raises(ValueError, match="at least one token"):
                await async_llm.score("")
            with pytest.raises(ValueError, match="at least one message"):
                await async_llm.render([])
            await async_llm.check_health()
            return found

    talked, scored, *vectors, rendered, own = asyncio.run(main())
    assert own.probs == pytest.approx(judged.probs, abs=1e-4)
    assert facts(talked[-1].outputs[0]) == facts(chat.outputs[0]) and len(talked) > 2
    assert rendered == {"prompt": chat.prompt, "prompt_token_ids": chat.prompt_token_ids}
    assert scored.ranks == score.ranks
    assert scored.logprobs == pytest.approx(score.logprobs, abs=1e-5)
    for found, own in zip(vectors, wanted, strict=True):
        assert found.outputs.embedding == pytest.approx(own.outputs.embedding, abs=1e-5)
        assert len(own.outputs.embedding) == 128


@pytest.mark.parametrize("interval", [1, 7, None])
def test_an_interval_wakes_a_caller_less_often(interval, hall, checkpoint, monkeypatch):
    """At the first token, at each seventh, and at the end; or at the end alone."""
    due, woken, step = [], [], hall.llm.step
    tell, wake, is_woken = _Mailbox.tell, _Mailbox.wake, threading.Semaphore(0)

    def telling(mailbox, output):
        found = tell(mailbox, output)
        due.extend([found] if found is not None else [])
        return found

    def waking(mailbox):
        wake(mailbox)
        woken.append(mailbox)
        is_woken.release()

    def stepping():  # when the loop is not late: else a caller is woken once for several times
        while due:
            assert due.pop() and is_woken.acquire(timeout=PATIENCE)
        step()

    monkeypatch.setattr(_Mailbox, "tell", telling)
    monkeypatch.setattr(_Mailbox, "wake", waking)
    monkeypatch.setattr(hall.llm, "step", stepping)

    async def main():
        stream = hall.async_llm.stream(PROMPT, greedy(30, ignore_eos=True), interval=interval)
        outputs = [output async for output in stream]
        await hall.assert_idle()
        return outputs

    outputs = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert [t for o in outputs for t in o["token_ids"]] == reference(checkpoint, PROMPT, 30)
    assert outputs[-1].finished
    assert len(woken) == {1: 30, 7: 6, None: 1}[interval]  # 1, 8, 15, 22, 29, 30
    assert len(outputs) <= len(woken)
    with pytest.raises(ValueError, match="`interval` must be at least 1"):
        hall.async_llm.stream(PROMPT, interval=0)


def test_an_error_comes_in_the_place_of_an_only_output(hall, monkeypatch):
    """Nobody takes the beginning of a text for all of it."""

    def failing():
        if hall.llm.core.metrics.num_steps > 3:
            raise RuntimeError("out of order")
        step()

    step = hall.llm.step
    monkeypatch.setattr(hall.llm, "step", failing)

    async def main():
        with pytest.raises(RuntimeError, match="out of order"):
            async for _ in hall.async_llm.stream(
                PROMPT, greedy(30, ignore_eos=True), interval=None
            ):
                pytest.fail("it had not ended")

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_one_call_of_the_loop_for_each_step(hall, checkpoint, monkeypatch):
    """It was one for each token."""
    prompts, params = [[i + 1, *PROMPT] for i in range(8)], greedy(40, ignore_eos=True)
    called = []

    async def main():
        loop = asyncio.get_running_loop()
        call, before = loop.call_soon_threadsafe, (await hall.metrics())["num_steps"]
        with monkeypatch.context() as patch:
            patch.setattr(
                loop, "call_soon_threadsafe", lambda *args: called.append(args) or call(*args)
            )
            work = [tokens_of(hall.async_llm, prompt, params) for prompt in prompts]
            found = await asyncio.gather(*work)
        assert found == [reference(checkpoint, prompt, 40) for prompt in prompts]
        num_steps = (await hall.metrics())["num_steps"] - before
        assert num_steps < 2 * 40, "they shared steps"
        assert 0 < len(called) <= num_steps

    asyncio.run(main())


def test_a_caller_whose_loop_is_late_is_woken_once(checkpoint):
    """He takes the news of all steps since then, and is woken for what comes after that."""
    mailbox, told = None, []

    async def main():
        nonlocal mailbox
        mailbox = _Mailbox(asyncio.get_running_loop(), News())
        with LLM(checkpoint, **SMALL) as llm:
            listener = lambda output: told.append(mailbox.tell(output))  # noqa: E731
            llm._enter(PROMPT, greedy(7, ignore_eos=True), None, listener, None)
            while len(told) < 4:
                llm.step()
            assert told == [mailbox, None, None, None]
            mailbox.wake()
            first = await mailbox.take()
            assert first.outputs[0].token_ids == reference(checkpoint, PROMPT, 4)
            while not llm.is_finished():
                llm.step()
        assert told[4:] == [mailbox, None, None]
        mailbox.wake()
        rest = await mailbox.take()
        assert rest.finished
        assert rest.outputs[0].token_ids == reference(checkpoint, PROMPT, 7)[4:]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_a_device_has_its_next_step_before_coroutines_run(overlap, checkpoint, monkeypatch):
    """Their work then costs no step: Python runs them or the engine, not both."""
    hall, calls = Hall(checkpoint, monkeypatch, device="cuda:0", overlap=overlap), []
    for name in ("run", "wait"):
        call = getattr(hall.llm.executor, name)
        noting = lambda *args, name=name, call=call: calls.append(name) or call(*args)  # noqa: E731
        monkeypatch.setattr(hall.llm.executor, name, noting)

    async def main():
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def noting_wakes(callback, *args):
            if getattr(callback, "__func__", None) is _Waker._wake:
                calls.append("wake")
            return call(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noting_wakes)
        params = greedy(20, ignore_eos=True)
        assert await tokens_of(hall.async_llm, PROMPT, params) == reference(checkpoint, PROMPT, 20)

    asyncio.run(main())
    hall.async_llm.exit()
    before = [calls[i - 1] for i, call in enumerate(calls) if call == "wake"]
    assert 1 < len(before) <= 20  # fewer if the loop is late
    # But where the last step, or none, is still to come.
    assert set(before[:-2]) <= {"run"} and before.count("wait") <= 2


@pytest.mark.parametrize("kind", ["stream", "generate"])
def test_what_has_queued_for_a_late_caller_is_one_output(kind, hall, checkpoint, monkeypatch):
    """He comes back when all is over: one output has the rest."""
    params = SamplingParams(seed=3, n=2, max_tokens=30, logprobs=2, ignore_eos=True)
    with LLM(checkpoint, **SMALL) as llm:
        [whole] = llm.generate([PROMPT], params, use_tqdm=False)
    step, taken = hall.llm.step, threading.Event()

    async def main():
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def stepping():
            if hall.llm.core.metrics.num_steps > 2:
                assert taken.wait(PATIENCE)  # or all would be the first output
            step()
            if hall.llm.is_finished():
                loop.call_soon_threadsafe(over.set)

        monkeypatch.setattr(hall.llm, "step", stepping)
        stream = getattr(hall.async_llm, kind)(PROMPT, params)
        outputs = [await anext(stream)]
        taken.set()
        await over.wait()
        outputs += [output async for output in stream]
        assert [output.finished for output in outputs] == [False, True]
        assert len(outputs[0]["token_ids"]) < 30
        found = outputs if kind == "stream" else outputs[1:]
        assert gather(found).popitem()[1] == [facts(done) for done in whole.outputs]
        for joined, wanted in zip(outputs[-1].outputs, whole.outputs, strict=True):
            assert joined.cumulative_logprob == wanted.cumulative_logprob
        await hall.assert_idle()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("kind", ["stream", "generate"])
def test_news_comes_before_the_error_that_follows(kind, hall, monkeypatch):
    """Both have queued: the caller gets what there is, then the error."""

    def failing():
        steps.append(1)
        if len(steps) > 2:
            assert taken.wait(PATIENCE)  # or all would be the first news
        if len(steps) < 6:
            return step()
        raise MemoryError("no memory")

    step, steps, taken, ended = hall.llm.step, [], threading.Event(), threading.Event()
    fail = _Jobs.fail
    monkeypatch.setattr(_Jobs, "fail", lambda jobs, error: (fail(jobs, error), ended.set()))

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(hall.llm, "step", failing)
            stream = getattr(hall.async_llm, kind)(PROMPT, greedy(None, ignore_eos=True))
            first = await anext(stream)
            taken.set()
            assert ended.wait(PATIENCE)  # and the loop stands still
            rest, length = await anext(stream), len(first["token_ids"])
            before = length if kind == "stream" else 0
            assert before + len(rest["token_ids"]) > length
            with pytest.raises(RuntimeError, match="no memory"):
                await anext(stream)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_coroutines_are_woken_a_few_at_a_time():
    """Others have their turn before all of them have had theirs, and the engine before each few.
    What is told meanwhile comes after them, by the same call.
    """
    order, calls = [], []

    class Mailbox:
        def wake(self):
            order.append("woken")

    class Turn:
        def wait(self, seconds):
            order.append("engine")

    async def main():
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or call(*args)
        waker = _Waker(Turn())
        waker.call(loop)
        assert not calls, "nobody is told"
        waker.told.extend(Mailbox() for _ in range(WAKE_AT_ONCE + 1))
        waker.call(loop)
        loop.call_soon(order.append, "another")
        waker.told.extend(Mailbox() for _ in range(2 * WAKE_AT_ONCE - 2))
        waker.call(loop)
        while order.count("woken") < 3 * WAKE_AT_ONCE - 1:
            await asyncio.sleep(0)
        assert len(calls) == 1
        await asyncio.sleep(0)
        waker.told.append(Mailbox())
        waker.call(loop)
        assert len(calls) == 2, "it is called again"

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    few = ["engine"] + ["woken"] * WAKE_AT_ONCE
    assert order[: 3 * WAKE_AT_ONCE + 3] == [*few, "another", *few, *few[:-1]]


@pytest.mark.parametrize("place", ["turn", "wake"])
def test_ctrl_c_in_a_loop_that_wakes_coroutines_loses_none(place):
    """A notebook's loop goes on after it."""
    woken, interrupts = [], {place: KeyboardInterrupt}

    def interrupt(at):
        if at in interrupts:
            raise interrupts.pop(at)

    class Mailbox:
        def wake(self):
            interrupt("wake")
            woken.append(self)

    class Turn:
        def wait(self, seconds):
            interrupt("turn")

    loop, waker = asyncio.new_event_loop(), _Waker(Turn())
    with contextlib.closing(loop):
        mailboxes = [Mailbox() for _ in range(3)]
        waker.told.extend(mailboxes[:2])
        waker.call(loop)
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        waker.told.append(mailboxes[2])
        waker.call(loop)
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))
        assert woken == mailboxes


def test_tokenizer_and_defaults():
    async def main():
        async with AsyncLLM(TINY, **SMALL) as async_llm:
            tokenizer = await async_llm.get_tokenizer()
            assert tokenizer.decode(tokenizer.encode("1+1=")) == "1+1="
            assert async_llm.get_default_sampling_params() == SamplingParams()
            assert not async_llm.is_closed
        assert async_llm.is_closed

    asyncio.run(main())


def test_defaults_and_order(hall, checkpoint):
    async def main():
        assert len(await tokens_of(hall.async_llm, PROMPT)) == SamplingParams().max_tokens
        work = [tokens_of(hall.async_llm, *item) for item in zip(PROMPTS, PARAMS, strict=True)]
        assert await asyncio.gather(*work) == references(checkpoint)
        await hall.assert_idle()

    asyncio.run(main())


def test_loop_goes_on_while_a_step_runs(hall, monkeypatch):
    """The step waits for what a coroutine does later: it would wait for ever in the loop."""
    run, go, entered = hall.llm.executor.run, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        assert go.wait(PATIENCE)
        return run(*args)

    monkeypatch.setattr(hall.llm.executor, "run", slow)

    async def main():
        request = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(3)))
        await asyncio.to_thread(entered.wait, PATIENCE)
        answer = asyncio.create_task(hall.async_llm.metrics())
        other = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(3)))
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        assert not request.done() and not answer.done() and not other.done()
        go.set()
        assert len(await request) == len(await other) == 3
        assert (await answer)["num_steps"] >= 0

    asyncio.run(main())


def test_engine_waits_without_work(hall, monkeypatch):
    """An idle engine takes no steps, nor looks for some."""
    steps, step = [], hall.llm.step
    monkeypatch.setattr(hall.llm, "step", lambda: steps.append(1) or step())

    async def main():
        for _ in range(3):
            await hall.metrics()
        assert not steps
        await tokens_of(hall.async_llm, PROMPT, greedy(3))
        await hall.metrics()
        count = len(steps)
        for _ in range(3):
            await hall.metrics()
        assert len(steps) == count <= 4

    asyncio.run(main())


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("others", [0, 1])
def test_what_the_last_steps_before_sleep_bring_is_told_at_once(
    others, device, checkpoint, monkeypatch
):
    """They are in flight when it comes, and no step follows: the news waited for the next one."""
    hall = Hall(checkpoint, monkeypatch, device=device, overlap=True, enable_sleep_mode=True)
    step, told, length = hall.llm.step, [], 40
    asked, launched, lulled = threading.Event(), threading.Event(), threading.Event()

    def stepping():
        if hall.llm.core.metrics.num_steps > 2:
            assert asked.wait(PATIENCE)
        step()
        if len(hall.llm.core.requests) > others and not launched.is_set():
            launched.set()
            assert lulled.wait(PATIENCE)  # until sleep is the next command

    async def listen():
        async for output in hall.async_llm.stream(PROMPT[::-1], greedy(length, ignore_eos=True)):
            told.extend(output["token_ids"])
            begun.set()

    async def main():
        monkeypatch.setattr(hall.llm, "step", stepping)
        long = [asyncio.create_task(listen()) for _ in range(others)]
        if others:
            await begun.wait()
        short = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(1)))
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)
        asked.set()
        assert await asyncio.to_thread(launched.wait, PATIENCE)
        sleep = asyncio.create_task(hall.async_llm.sleep())
        await asyncio.sleep(0)
        assert not short.done()
        lulled.set()
        await sleep
        assert await short == reference(checkpoint, PROMPT, 1)
        assert await hall.async_llm.is_sleeping()
        for request in hall.llm.core.requests.values():
            [seq] = request.seqs
            assert 0 < len(told) == seq.num_tokens - seq.num_prompt_tokens < length
        await hall.async_llm.wake_up()
        await asyncio.gather(*long)
        assert told == reference(checkpoint, PROMPT[::-1], length)[: length * others]

    begun = asyncio.Event()
    try:
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
    finally:
        hall.async_llm.exit()


@pytest.mark.parametrize("method", ["update_weights", "load_adapter"])
def test_tensors_are_complete_before_the_engine_reads_them(method, hall, monkeypatch):
    """Work that the caller's thread has queued on the GPU writes them, and no stream of the
    engine's waits for it.
    """
    order = []

    class Stream:
        def synchronize(self):
            order.append("written")

    monkeypatch.setattr(hall.llm, method, lambda *_, **__: order.append("read"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    asyncio.run(getattr(hall.async_llm, method)(({}, {})))
    assert order == ["written", "read"]


# -- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "break", "close", "drop", "timeout"])
def test_left_requests_are_aborted(how, hall, checkpoint):
    async def leave(stream):
        async for _ in stream:
            if how in ("break", "drop"):
                break

    async def main():
        stays = asyncio.create_task(tokens_of(hall.async_llm, PROMPTS[2], PARAMS[2]))
        endless = greedy(None, ignore_eos=True)
        stream = hall.async_llm.stream(PROMPT, endless)
        first = await anext(stream)
        assert not first.finished
        if how == "cancel":
            task = asyncio.create_task(leave(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(leave(stream), 0)
            await stream.aclose()
        elif how == "close":
            await anext(stream)
            await stream.aclose()
        else:
            await leave(stream)
            if how == "break":
                await stream.aclose()
        del stream
        gc.collect()
        for _ in range(2):  # the loop closes what was dropped in a task of its own
            await asyncio.sleep(0)
        assert await stays == references(checkpoint)[2]
        await hall.assert_idle()
        await assert_usable_async(hall, checkpoint)
        # endless would have been as long as the model allows
        assert hall.llm.metrics()["num_finished"] == 2

    asyncio.run(main())


def test_forms_that_take_long_keep_other_chats_from_nothing(monkeypatch):
    """Nor the end of the engine, once those who asked have left."""
    may_end, begun = threading.Event(), []

    def compiling(*_):
        begun.append(1)
        assert may_end.wait(PATIENCE)

    monkeypatch.setattr(GrammarCompiler, "compile", compiling)
    params = [greedy(3), greedy(3, structured_outputs=StructuredOutputsParams(regex="b"))]

    async def last(async_llm, own):
        return [
            output async for output in async_llm.chat([{"role": "user", "content": "1+1="}], own)
        ][-1]

    async def main():
        async with AsyncLLM(TINY) as async_llm:
            tasks = [asyncio.create_task(last(async_llm, params[1])) for _ in range(40)]
            while len(begun) < COMPILING_FORMS:
                await asyncio.sleep(0)
            assert (await last(async_llm, params[0])).finished
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in found)
        assert len(begun) == COMPILING_FORMS, "calls that had not begun are dropped"

    try:
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
    finally:
        may_end.set()


def test_cancelled_before_it_was_queued(hall, checkpoint, monkeypatch):
    """Cancelled while the engine is in another's step, so that it comes and goes at once."""
    run, go, entered = hall.llm.executor.run, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        assert go.wait(PATIENCE)
        return run(*args)

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(hall.llm.executor, "run", slow)
            first = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(3)))
            await asyncio.to_thread(entered.wait, PATIENCE)
            late = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(None)))
            asked = asyncio.create_task(hall.async_llm.metrics())
            for _ in range(5):
                await asyncio.sleep(0)
            late.cancel()
            asked.cancel()  # its answer comes, and nobody wants it
            for task in (late, asked):
                with pytest.raises(asyncio.CancelledError):
                    await task
            go.set()
            assert await first == reference(checkpoint, PROMPT, 3)
        await hall.assert_idle()
        assert hall.llm.metrics()["num_finished"] == 1

    problems = []

    async def watched():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        await main()

    asyncio.run(watched())
    assert not problems


def test_never_started(hall):
    async def main():
        hall.async_llm.stream(PROMPT)
        hall.async_llm.stream([])
        gc.collect()
        assert (await hall.metrics())["num_steps"] == 0
        await hall.assert_idle()

    asyncio.run(main())


def test_one_loop_after_another(hall, checkpoint):
    """The first is closed while its requests run, and nobody tells the engine."""
    loop = asyncio.new_event_loop()
    stream = hall.async_llm.stream(PROMPT, greedy(None, ignore_eos=True))
    try:
        assert not loop.run_until_complete(anext(stream)).finished
        answer = loop.create_task(hall.async_llm.metrics())
        loop.run_until_complete(asyncio.sleep(0))
        assert not answer.done()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(answer)
    finally:
        loop.close()
    for _ in range(2):
        asyncio.run(assert_usable_async(hall, checkpoint))
    # `stream` is still held
    assert hall.llm.metrics()["num_finished"] == 2, "the request of the closed loop ran on"
    del stream


def test_answer_for_a_closed_loop(hall, checkpoint, monkeypatch):
    """It ended the engine's thread, and all that came later waited for ever."""
    go, metrics = threading.Event(), hall.llm.metrics

    def slow():
        assert go.wait(PATIENCE)
        return metrics()

    with monkeypatch.context() as patch:
        patch.setattr(hall.llm, "metrics", slow)
        loop = asyncio.new_event_loop()
        answer = loop.create_task(hall.async_llm.metrics())
        loop.run_until_complete(asyncio.sleep(0))
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(answer)
        loop.close()
        go.set()
        asyncio.run(assert_usable_async(hall, checkpoint))


# -- errors ---------------------------------------------------------------------------------------

WRONG = {
    "prompt": ([], None, ValueError, "`prompt` must have at least one token"),
    "token": ([10**6], None, ValueError, "`prompt` must hold token ids in 0"),
    "type": (7, None, TypeError, "`prompt` must be a string"),
    "text": ("text", None, ValueError, "no tokenizer"),
    "params": (PROMPT, "greedy", TypeError, "`sampling_params` must be a SamplingParams"),
    "stop": (PROMPT, greedy(2, stop=["x"]), ValueError, "stop` needs a tokenizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_to_who_made_them(name, hall, checkpoint):
    prompt, params, error, message = WRONG[name]

    async def main():
        right = asyncio.create_task(tokens_of(hall.async_llm, PROMPT, greedy(6)))
        with pytest.raises(error, match=message):
            await collect(hall.async_llm, prompt, params)
        assert await right == reference(checkpoint, PROMPT, 6)
        await assert_usable_async(hall, checkpoint)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("k", "after"),
    [
        pytest.param(1, False, id="first", marks=pytest.mark.slow),
        pytest.param(3, True, id="after-third"),
    ],
)
@pytest.mark.parametrize("point", sorted(set(FAULT_POINTS) - {"output"}))
def test_error_in_a_step_reaches_all(point, k, after, hall, checkpoint, monkeypatch):
    async def main():
        with monkeypatch.context() as patch:
            error = RuntimeError("out of memory")
            fail_at(patch, *FAULT_POINTS[point](hall.llm), k, error, after=after)
            work = [tokens_of(hall.async_llm, *item) for item in zip(PROMPTS, PARAMS, strict=True)]
            found = await asyncio.gather(*work, return_exceptions=True)
        # They come one after the other: some may have ended before, or have begun after it.
        assert any(one is error for one in found)
        for one, expected in zip(found, references(checkpoint), strict=True):
            assert one is error or one == expected
        await hall.assert_idle()
        await assert_usable_async(hall, checkpoint)

    asyncio.run(main())


def test_error_reaches_all_that_run(hall, checkpoint, monkeypatch):
    """As a fault, though its type is that of a caller's mistake."""
    step, error = hall.llm.step, ValueError("no memory")

    def failing():
        running = hall.llm.scheduler.running
        if [seq.num_known_tokens > seq.num_prompt_tokens for seq in running] == [True, True]:
            raise error
        return step()

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(hall.llm, "step", failing)
            work = [collect(hall.async_llm, p, greedy(None)) for p in (PROMPT, PROMPT[::-1])]
            found = await asyncio.gather(*work, return_exceptions=True)
        assert [type(one) for one in found] == [RuntimeError] * 2
        assert [one.__cause__ for one in found] == [error] * 2
        await hall.assert_idle()
        await assert_usable_async(hall, checkpoint)

    asyncio.run(main())


def test_error_in_an_abort_reaches_all(hall, checkpoint, monkeypatch):
    """It drops every request. It ended the engine's thread, and all waited for ever."""

    async def main():
        streams = [hall.async_llm.stream(PROMPT, greedy(None)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with monkeypatch.context() as patch:
            error = RuntimeError("torn books")
            fail_at(patch, hall.llm.scheduler, "abort", 1, error)
            await streams[0].aclose()
            with pytest.raises(RuntimeError, match="torn books"):
                async for _ in streams[1]:
                    pass
        await hall.assert_idle()
        await assert_usable_async(hall, checkpoint)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_error_that_closes_the_engine(hall, monkeypatch):
    """A dead worker, say: it reaches who waits, and who comes later is told."""

    def broken(*args):
        hall.llm.executor.is_broken = True
        raise RuntimeError("a worker has died")

    monkeypatch.setattr(hall.llm.executor, "run", broken)

    async def main():
        with pytest.raises(RuntimeError, match="a worker has died"):
            await collect(hall.async_llm, PROMPT)
        with pytest.raises(RuntimeError, match="this engine is closed"):
            await collect(hall.async_llm, PROMPT)
        with pytest.raises(RuntimeError, match="this engine is closed"):
            await hall.metrics()

    asyncio.run(main())


def test_error_that_closes_the_engine_in_an_update(hall, monkeypatch):
    """It reaches who has called, and all whose requests wait for the update's end: they waited for
    ever.
    """

    def broken(*_):
        hall.llm.executor.is_broken = True
        raise RuntimeError("a worker has died")

    async def main():
        stream = hall.async_llm.stream(PROMPT, greedy(None, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(hall.llm.executor, "on_all_ranks", broken)
        with pytest.raises(RuntimeError, match="a worker has died"):
            await hall.async_llm.start_weight_update()
        with pytest.raises(RuntimeError, match="a worker has died"):
            async for output in stream:
                assert not output.finished
        with pytest.raises(RuntimeError, match="this engine is closed"):
            await hall.async_llm.start_weight_update()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# -- the end --------------------------------------------------------------------------------------


def test_exit_with_requests_under_way(hall):
    async def main():
        stream = hall.async_llm.stream(PROMPT, greedy(None, ignore_eos=True))
        await anext(stream)
        late = asyncio.create_task(collect(hall.async_llm, PROMPT[::-1], greedy(None)))
        await asyncio.sleep(0)
        await asyncio.to_thread(hall.async_llm.exit)
        with pytest.raises(RuntimeError, match="this engine is closed: build a new AsyncLLM"):
            async for output in stream:
                assert not output.finished
        with pytest.raises(RuntimeError, match="this engine is closed: build a new AsyncLLM"):
            await late
        await after_the_end(hall.async_llm)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert hall.llm.is_closed


async def after_the_end(async_llm):
    async_llm.exit()
    calls = [collect(async_llm, PROMPT), async_llm.metrics(), async_llm.__aenter__()]
    for call in calls:
        with pytest.raises(RuntimeError, match="this engine is closed: build a new AsyncLLM"):
            await call


def test_context_manager_closes(checkpoint):
    async def main():
        with pytest.raises(KeyError, match="the caller's"):
            async with AsyncLLM(checkpoint, **SMALL) as async_llm:
                assert await tokens_of(async_llm, PROMPT, greedy(2))
                raise KeyError("the caller's")
        assert not async_llm._thread.is_alive()
        await after_the_end(async_llm)

    asyncio.run(main())


def test_nothing_is_asked_behind_the_end(checkpoint):
    """Checked before exit() and queued after it, a request waited forever."""
    async_llm = AsyncLLM(checkpoint, **SMALL)
    check, thread = async_llm._check_open, threading.Thread(target=async_llm.exit)

    def slow():
        check()
        thread.start()
        thread.join(0.2)  # it must wait for us

    async_llm._check_open = slow

    async def main():
        with pytest.raises(RuntimeError, match="this engine is closed"):
            await collect(async_llm, PROMPT, greedy(None))

    asyncio.run(main())
    thread.join(PATIENCE)
    assert not async_llm._thread.is_alive()


@pytest.mark.parametrize("end", ["unused", "used", "left", "failed"])
def test_del_frees_the_engine(end, checkpoint, monkeypatch):
    """No request, coroutine or error keeps it, nor does its own thread."""
    hall = Hall(checkpoint, monkeypatch)
    thread, runner = hall.async_llm._thread, weakref.ref(hall.llm.model_runner)

    async def main(async_llm):
        if end in ("used", "left"):
            await collect(async_llm, PROMPT, greedy(5))
        if end == "left":
            stream = async_llm.stream(PROMPT, greedy(None))
            await anext(stream)
        if end == "failed":
            with pytest.raises(ValueError, match="at least one token"):
                await collect(async_llm, [])

    asyncio.run(main(hall.async_llm))
    del hall
    for _ in range(100):  # the thread may still have held the error when garbage was collected
        gc.collect()
        thread.join(PATIENCE / 100)
        if not thread.is_alive():
            break
    assert not thread.is_alive()
    gc.collect()
    assert runner() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_a_forked_child_is_told_so():
    """It asked a thread that it does not have, and waited. Its end leaves the parent's alone."""
    code = f"""
import asyncio, gc, os, sys
from nanovllm import TINY, AsyncLLM, SamplingParams
async_llm = AsyncLLM(TINY, **{SMALL})
async def collect():
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return [token async for o in async_llm.stream("a", params) for token in o["token_ids"]]
async def told(call):
    try:
        print("returned", await call)
    except RuntimeError as error:
        assert "a forked process" in str(error), error
async_llm._lock.__enter__()
child = os.fork()
if not child:
    for call in (collect(), anext(async_llm.generate("a")), async_llm.metrics(),
                 async_llm.__aenter__()):
        asyncio.run(told(call))
    assert not async_llm.is_closed
    async_llm.exit()
    del async_llm
    gc.collect()
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
async_llm._lock.__exit__(None, None, None)
print(len(asyncio.run(collect())), "tokens")
async_llm.exit()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "child 7\n3 tokens\n"), done.stderr


def test_failed_construction_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(ValueError, match="`model` must be the directory"):
        AsyncLLM(tmp_path / "nothing", **SMALL)
    assert threading.active_count() == before


def test_thread_gives_the_memory_back(checkpoint):
    """`_serve` alone: it ends with the command None, and closes the engine."""
    llm, commands = LLM(checkpoint, **SMALL), queue.SimpleQueue()
    heard = []
    commands.put(lambda jobs: jobs.add(PROMPT, greedy(None), heard.append))
    commands.put(None)
    _serve(llm, commands)
    assert llm.is_closed
    assert isinstance(heard[-1], RuntimeError)


def test_used_engine_is_an_llm(checkpoint):
    """The thread leaves the same state as `LLM.stream`."""
    llm = LLM(checkpoint, **SMALL)
    jobs, heard = _Jobs(llm), []
    jobs.add(PROMPT, greedy(50), heard.append)
    jobs.step()
    jobs.fail(RuntimeError("the end"))
    jobs.fail(RuntimeError("nobody hears"))
    assert [str(item) for item in heard[-1:]] == ["the end"]
    assert_usable(llm, checkpoint)
    llm.exit()
