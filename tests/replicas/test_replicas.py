"""Data parallelism: the results of one engine, whatever becomes of replicas; nothing is left."""

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import SMALL, make_checkpoint, with_rare
from faults import (
    DEADLINE,
    FAULTS,
    children,
    traces,
    wait_until,
    within_deadline,
)
from nanovllm import (
    LLM,
    TINY,
    AsyncLLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    WorkerError,
)
from nanovllm.replicas import supervisor
from nanovllm.replicas.messages import News
from nanovllm.replicas.remote_request import MAX_LOSSES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux only")

OPTIONS = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}
DP2 = {**OPTIONS, "data_parallel_size": 2}
PLAIN = {**SMALL, "data_parallel_size": 2}  # for a checkpoint without tokenizer
COUNT = "count from {}: "
PROMPTS = [f"{a}+{a + 7}=" for a in range(100, 108)] + [COUNT.format(a) for a in range(10, 20)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)


def pids(llm):
    return {number: each.process.pid for number, each in llm.executor._replicas.items()}


def plain(output):
    """Facts for comparison, without log-probabilities."""
    return [
        (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason)
        for each in output.outputs
    ]


def assert_same(found, wanted):
    assert [plain(output) for output in found] == [plain(output) for output in wanted]
    assert [output.prompt for output in found] == [output.prompt for output in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        for mine, its in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
            assert [*map(texts, mine.logprobs or [])] == [*map(texts, its.logprobs or [])]
            assert mine.sampling_mask == its.sampling_mask


def texts(place):
    """The tokens and texts of a place in log-probabilities; None for a place without."""
    return place and {token: item.decoded_token for token, item in place.items()}


@pytest.fixture(scope="module")
def one():
    with LLM(TINY, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two():
    before = traces()
    with LLM(TINY, **DP2) as llm:
        yield llm
    del llm
    assert traces() == before


@pytest.fixture
def disturbed(two):
    """An engine one of whose replicas a test kills, once. A restart takes seconds."""
    before = two.executor.num_restarts
    yield two
    within_deadline(lambda: until_ready(two))
    assert two.executor.num_restarts == before + 1
    two.executor._tries[:] = [1, 1]


def until_ready(llm):
    def is_ready():
        llm.step()  # without requests it does not wait
        return len(llm.executor.ready) == 2

    wait_until(is_ready)


# -- the same as one engine ------------------------------------------------------------------------

KINDS = [
    GREEDY,
    replace(DRAWN, seed=5),
    DRAWN,  # by the engine's seed and the place among all requests
    replace(DRAWN, n=3),
    replace(GREEDY, stop=["4", " 2"], logprobs=2),
    replace(GREEDY, logprobs=1, prompt_logprobs=1),
    replace(
        *(DRAWN,),
        **{"top_k": 5, "repetition_penalty": 1.3, "bad_words": ["1"], "seed": 1, "logprobs": 0},
        **{"logprobs_mode": "processed_logprobs", "return_sampling_mask": True},
    ),
    replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-f]{5}")),
    replace(DRAWN, max_tokens=3, seed=2),
]
PARAMS = {"one for all": DRAWN, "each its own": KINDS * (len(PROMPTS) // len(KINDS))}


@pytest.mark.slow
def test_states_limit_what_a_replica_is_given(tmp_path: Path) -> None:
    """Half of the memory is for states, of fewer sequences than the option has: a replica gets as
    many requests, and an eighth more.
    """
    sizes = {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2}
    heads = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
    path = make_checkpoint(tmp_path / "model", "qwen3_5_text", **sizes, **heads)
    options = {key: value for key, value in PLAIN.items() if key != "num_kvcache_blocks"}
    options |= {"max_num_seqs": 64, "kv_cache_memory_bytes": 2_000_000}
    with LLM(path, **options) as llm:
        most = llm.metrics()["max_num_seqs"]
        assert most < 48
        for i in range(400):
            llm.add_request([i % 100, 1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
        llm.step()
        replicas = llm.metrics()["replicas"].values()
        held = [each["num_running"] + each["num_waiting"] for each in replicas]
        assert 0 < max(held) <= most + -(-most // 8), (held, most)


@pytest.mark.parametrize("case", PARAMS)
def test_generate_gives_what_one_engine_gives(case, one, two):
    one._intake._num_seqs = two._intake._num_seqs  # what is drawn depends on the place
    before = two.metrics()["replicas"]
    found = two.generate(PROMPTS, PARAMS[case], use_tqdm=False)
    assert_same(found, one.generate(PROMPTS, PARAMS[case], use_tqdm=False))
    after = two.metrics()["replicas"]
    done = [after[i]["num_finished"] - before[i]["num_finished"] for i in ("0", "1")]
    assert sum(done) == len(PROMPTS)
    assert min(done) > 0, "both have worked"


def joined(outputs):
    """Text and tokens of each completion, by request; the end is told once."""
    found, ended = {}, []
    for output in outputs:
        for each in output.outputs:
            whole = found.setdefault(output.request_id, {}).setdefault(each.index, ["", [], None])
            whole[0] += each.text
            whole[1] += each.token_ids
            whole[2] = each.cumulative_logprob
        if output.finished:
            ended.append(output.request_id)
    assert sorted(ended) == sorted(found), "each ends once"
    return [[tuple(found[i][index][:2]) for index in sorted(found[i])] for i in sorted(found)], [
        [found[i][index][2] for index in sorted(found[i])] for i in sorted(found)
    ]


def masks_of(outputs):
    """The masks of each completion, put together."""
    found = {}
    for output in sorted(outputs, key=lambda output: output.request_id):  # in their order
        for each in output.outputs:
            found.setdefault((output.request_id, each.index), []).extend(each.sampling_mask or ())
    return [found[key] for key in sorted(found)]


def as_joined(outputs):
    return [[(each.text, each.token_ids) for each in output.outputs] for output in outputs]


def test_other_calls_give_what_one_engine_gives(one, two):
    assert joined(two.stream(PROMPTS, GREEDY))[0] == as_joined(one.generate(PROMPTS, GREEDY))
    for ours, theirs in zip(two.score(PROMPTS), one.score(PROMPTS), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.ranks == theirs.ranks
    for pooling in ("last", "mean"):
        found, wanted = two.embed(PROMPTS, pooling), one.embed(PROMPTS, pooling)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.outputs.embedding == pytest.approx(theirs.outputs.embedding, abs=1e-4)
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    for ours, theirs in zip(
        two.beam_search(PROMPTS[:3], beams), one.beam_search(PROMPTS[:3], beams), strict=True
    ):
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    found = two.chat(talk, GREEDY, use_tqdm=False, chat_template=template)
    assert_same(found, one.chat(talk, GREEDY, use_tqdm=False, chat_template=template))


def test_step_abort_and_refusals(one, two):
    wanted = {output.prompt: plain(output) for output in one.generate(PROMPTS, GREEDY)}
    ids = [two.add_request(prompt, GREEDY) for prompt in PROMPTS]
    heard = []
    listened = two.add_request(PROMPTS[0], GREEDY, listener=heard.append)
    assert two.abort(ids[-1])
    assert not two.abort(ids[-1])
    found = {}
    while not two.is_finished():
        found.update({output.request_id: output for output in two.step()})
    assert sorted(found) == ids[:-1], "those of a listener are its own"
    for output in found.values():
        assert plain(output) == wanted[output.prompt]
    assert {output.request_id for output in heard} == {listened}
    assert heard[-1].finished
    outputs = two.generate(["1+1=", "9" * 300], GREEDY, on_error="return", use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False]
    with pytest.raises(ValueError, match="max_model_len"):
        two.generate(["1+1=", "9" * 300], GREEDY)


def test_metrics_are_sums_and_of_each(two):
    two.generate(PROMPTS, GREEDY, use_tqdm=False)  # with it, both say all that they have done
    before = two.metrics()
    two.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = two.metrics()
    assert after["num_finished"] - before["num_finished"] == len(PROMPTS)
    for name in ("num_finished", "num_generated_tokens", "num_prefill_tokens", "num_steps"):
        total, of_replicas = after[name] - before[name], sum_of(after, name) - sum_of(before, name)
        assert total == of_replicas > 0, "those that tests have killed count only before"
    count = sum(each["total_seconds"]["count"] for each in after["replicas"].values())
    assert after["total_seconds"]["count"] == count
    assert after["total_seconds"]["max"] > 0
    assert after["num_kvcache_blocks"] == 2 * OPTIONS["num_kvcache_blocks"]
    assert after["data_parallel_size"] == 2
    assert after["num_replica_restarts"] == before["num_replica_restarts"]
    assert "2 replicas" in repr(two)


def sum_of(metrics, name):
    return sum(each[name] for each in metrics["replicas"].values())


def test_prefixes_are_cached_and_forgotten(two):
    prompts = ["x" * 40, *("x" * 40 + str(i) for i in range(5))]
    two.reset_prefix_cache()
    cold = two.generate(prompts[0], GREEDY, use_tqdm=False)[0]
    (warm,) = two.generate(prompts[1], GREEDY, use_tqdm=False)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32), "it went to the same one"
    two.reset_prefix_cache()
    assert two.generate(prompts[1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


# -- replicas that die -----------------------------------------------------------------------------


def kill_at_order(llm, monkeypatch, condition):
    """SIGKILL the replica that is told to take orders of which the condition holds, just before:
    later it could have finished them. Returns the numbers of those killed.
    """
    tell, killed = llm.executor.tell, []

    def wrapped(number, method, *args):
        if method == "take" and condition(*args):
            killed.append(number)
            os.kill(pids(llm)[number], signal.SIGKILL)
        tell(number, method, *args)

    monkeypatch.setattr(llm.executor, "tell", wrapped)
    return killed


def test_generate_survives_a_death(disturbed, one, monkeypatch, caplog):
    llm, params = disturbed, replace(DRAWN, seed=3)
    before, metrics = pids(llm), llm.core.metrics
    finished = metrics.num_finished
    killed = kill_at_order(
        llm, monkeypatch, lambda _: not killed and metrics.num_finished > finished + 2
    )
    found = within_deadline(lambda: llm.generate(PROMPTS, params, use_tqdm=False))
    (number,) = killed
    assert_same(found, one.generate(PROMPTS, params, use_tqdm=False))
    assert metrics.num_finished == finished + len(PROMPTS)
    (record,) = [record for record in caplog.records if "was killed" in record.getMessage()]
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    lost = re.match(
        rf"replica {number} was killed by SIGKILL.*; its (\d+) unfinished requests", said
    )
    assert int(lost[1]) > 0
    within_deadline(lambda: until_ready(llm))
    assert pids(llm)[number] != before[number]
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_same(found, one.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert llm.metrics()["replicas"][str(number)]["num_finished"] > 0, "it works again"


STREAMED = {
    "drawn": replace(DRAWN, seed=3),
    "several": replace(
        *(DRAWN,),
        **{"seed": 3, "n": 2, "min_tokens": 3, "stop": ["4", "e "], "logprobs": 0, "top_k": 40},
        **{"logprobs_mode": "temperature_logprobs", "return_sampling_mask": True},
    ),
    "form": replace(
        GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-f]{30}"), max_tokens=40
    ),
    "penalties": replace(DRAWN, seed=3, frequency_penalty=1.5, presence_penalty=0.5),
}


@pytest.mark.parametrize("case", with_rare(STREAMED, *STREAMED.keys() - {"several"}))
def test_stream_goes_on_elsewhere_from_what_was_told(case, disturbed, one):
    """In the middle of sequences: nothing is told twice, nothing is missing."""
    params = replace(STREAMED[case], detokenize=True)
    outputs, told = [], {}

    def consume():
        for output in disturbed.stream(PROMPTS, params):
            outputs.append(output)
            told[output.request_id] = told.get(output.request_id, 0) + 1
            if sum(count > 4 for count in told.values()) == 3 and not killed:
                killed.append(pids(disturbed)[1])
                os.kill(killed[0], signal.SIGKILL)

    killed = []
    within_deadline(consume)
    assert killed
    wanted = one.generate(PROMPTS, params, use_tqdm=False)
    found, logprobs = joined(outputs)
    assert found == as_joined(wanted)
    assert masks_of(outputs) == masks_of(wanted)
    if params.logprobs is not None:
        sums = [[each.cumulative_logprob for each in output.outputs] for output in wanted]
        for mine, its in zip(logprobs, sums, strict=True):
            assert mine == pytest.approx(its, abs=1e-3)


@pytest.mark.slow  # streams of an `LLM` go on likewise
def test_async_goes_on_elsewhere(checkpoint, monkeypatch):
    prompts, params = [[i, i + 1] for i in range(12)], replace(DRAWN, seed=2)

    async def main():
        async with AsyncLLM(checkpoint, **PLAIN) as llm:
            started, killed = _replicas_of_async(), []

            async def ask(prompt):
                last = None
                async with aclosing(llm.generate(prompt, params)) as stream:
                    async for output in stream:
                        last = output
                        told = len(output.outputs[0].token_ids)
                        if prompt == prompts[5] and told >= 4 and not killed:
                            killed.append(started[0].process.pid)
                            os.kill(killed[0], signal.SIGKILL)
                return last

            found = await asyncio.wait_for(asyncio.gather(*map(ask, prompts)), DEADLINE)
            assert killed
            assert [*(await llm.metrics())["replicas"]] == ["1"], "no time for a restart"
            return found

    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 0)
    with LLM(checkpoint, **SMALL) as llm:
        assert_same(asyncio.run(main()), llm.generate(prompts, params, use_tqdm=False))


def _replicas_of_async():
    """An `AsyncLLM` keeps its engine in a thread."""
    found = [each for each in gc.get_objects() if isinstance(each, supervisor.Replicas)]
    return max(found, key=id_of_start)._replicas


def id_of_start(found):
    return max((each.process.pid for each in found._replicas.values()), default=0)


@pytest.mark.slow  # restarts take seconds, and deaths beside requests are noticed likewise
def test_death_without_requests_is_noticed_by_the_next_call(disturbed, one):
    process = disturbed.executor._replicas[1].process
    process.kill()
    process.wait()
    for _ in range(2):
        assert within_deadline(disturbed.metrics)["num_running"] == 0
    found = within_deadline(lambda: disturbed.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert_same(found, one.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.slow
def test_a_request_that_replicas_die_of_is_given_up(two, one, monkeypatch):
    """Alone: it ended all replicas, and with them the call."""
    poison = two.get_tokenizer().encode(PROMPTS[3])
    killed = kill_at_order(
        two, monkeypatch, lambda orders: poison in [order.token_ids for order in orders]
    )
    found = within_deadline(lambda: two.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert len(killed) == MAX_LOSSES
    failed = found.pop(3)
    assert "was killed by SIGKILL" in failed.error
    assert failed.prompt == PROMPTS[3]
    wanted = one.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_same(found, wanted[:3] + wanted[4:])
    within_deadline(lambda: until_ready(two))
    two.executor._tries[:] = [1, 1]


@pytest.mark.slow
def test_a_replica_that_hangs_hangs_nobody_else(checkpoint, monkeypatch):
    """It does not read what it is told, and does not answer: the caller can still go."""
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 0.2)
    socketpair = socket.socketpair

    def small_pair():
        ours, theirs = socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
        return ours, theirs

    monkeypatch.setattr(supervisor.socket, "socketpair", small_pair)
    before = traces()
    llm = LLM(checkpoint, **{**PLAIN, "max_num_seqs": 16, "max_num_batched_tokens": 256})
    os.kill(pids(llm)[1], signal.SIGSTOP)
    wait_until(lambda: [*within_deadline(llm.metrics)["replicas"]] == ["0"])
    step = llm.core.step

    def press():
        step()
        numbers = map(llm.core._dispatcher.replica_of, llm.core.requests.values())
        if llm.core.metrics.num_finished and 0 not in numbers:
            raise KeyboardInterrupt  # the other one has done all that it was given

    monkeypatch.setattr(llm.core, "step", press)
    prompts = [[i % 100] * 100 for i in range(30)]  # more than the socket holds
    with pytest.raises(KeyboardInterrupt):
        within_deadline(lambda: llm.generate(prompts, GREEDY, use_tqdm=False))
    within_deadline(llm.exit)
    assert traces() == before


@pytest.mark.slow
def test_a_replica_that_cannot_be_started_again(checkpoint, monkeypatch, caplog):
    """The system may have no memory for another process, when it has just killed one for that."""
    before = traces()
    llm = LLM(checkpoint, **PLAIN)

    def fail(*args, **options):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(supervisor, "start_python", fail)
    os.kill(pids(llm)[0], signal.SIGKILL)
    prompts = [[i, i + 1] for i in range(6)]
    found = within_deadline(lambda: llm.generate(prompts, GREEDY, use_tqdm=False))
    assert [len(output.outputs[0].token_ids) for output in found] == [24] * 6
    wait_until(lambda: not llm.step() and len(llm.executor.ready) == 1)
    assert "cannot be restarted" in caplog.text
    os.kill(pids(llm)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="replica 1"):
        within_deadline(lambda: llm.generate(prompts, GREEDY, use_tqdm=False))
    assert llm.is_closed
    assert traces() == before


def test_listeners_may_abort_and_raise(two):
    """An aborted request is heard no more; an error comes out of `step`, others lose nothing."""
    heard = {"a": [], "b": [], "c": []}
    ids = {}

    def listen(name):
        def hear(output):
            heard[name].append(output)
            if name != "c":  # the other one has said nothing yet, though it may have ended
                assert two.abort(ids["a"])
                assert two.abort(ids["b"])
            elif len(heard["c"]) == 2:
                raise LookupError("of the caller")

        return hear

    for name in heard:
        ids[name] = two.add_request(COUNT.format(10), GREEDY, listener=listen(name))
    with pytest.raises(LookupError, match="of the caller"):
        while True:
            two.step()
    while not two.is_finished():
        two.step()
    assert heard["c"][-1].finished
    (first,) = heard["a"] + heard["b"]
    assert not first.finished


def told(inbox):
    """News with outputs in an inbox."""
    return [each for _, each in [*inbox] if isinstance(each, News) and each.outputs]


def test_what_comes_before_a_hold_is_told_by_it(two, monkeypatch):
    """No step follows until the engine goes on, nor did the listener hear of it before."""
    heard, inbox = [], two.executor._inbox
    two.add_request(COUNT.format(3), GREEDY, listener=heard.append)
    with monkeypatch.context() as patch:
        patch.setattr(two.core, "_book_all", lambda seconds: None)
        two.step()
    wait_until(lambda: any(news.outputs[-1].finished for news in told(inbox)))
    assert not heard
    two.core.hold()
    try:
        assert heard[-1].finished and not two.core.requests
    finally:
        two.core.release(0)


def test_the_call_fails_when_none_is_left(checkpoint, inject, monkeypatch, caplog):
    """An error in the model ends each replica that meets it."""
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 0)
    inject("nanovllm.engine.model_runner:ModelRunner.launch", FAULTS["raise"][0], rank=0)
    before = traces()
    llm = LLM(checkpoint, **PLAIN)
    with pytest.raises(WorkerError, match=r"^replica \d ended with exit code 1") as caught:
        within_deadline(lambda: llm.generate([[1, 2], [3, 4]], use_tqdm=False))
    assert llm.is_closed
    assert "LookupError: injected" in caught.value.worker_traceback
    assert "not restarted" in caplog.text
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.generate([[1, 2]])
    assert traces() == before


@pytest.mark.slow  # without an update, the call before fails
def test_requests_end_when_none_is_left_in_an_update(checkpoint):
    """They wait for its end, and would for ever. The reason is that of a replica."""
    prompts = [[i + 1, 5] for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def main():
        async with AsyncLLM(checkpoint, **PLAIN) as llm:
            begun = asyncio.Event()

            async def ask(prompt):
                async for _ in llm.stream(prompt, params):
                    begun.set()

            asked = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            await begun.wait()
            await llm.start_weight_update()
            for each in list(_replicas_of_async().values()):
                each.process.kill()
            killed = r"^replica \d was killed by SIGKILL .* This engine is closed"
            with pytest.raises(WorkerError, match=killed):
                await llm.start_weight_update()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert any(found)
            assert {type(error) for error in found} <= {WorkerError, type(None)}
            with pytest.raises(RuntimeError, match="this engine is closed"):
                await llm.metrics()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


@pytest.mark.slow
def test_death_of_all_that_metrics_notice_closes_the_engine(checkpoint, monkeypatch):
    """The next call waited for replicas for ever."""
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 0)
    with LLM(checkpoint, **PLAIN) as llm:
        for each in llm.executor._replicas.values():
            each.process.kill()
        wait_until(lambda: len(llm.executor._inbox) == 2)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            llm.metrics()
        assert llm.is_closed


# -- start and end ---------------------------------------------------------------------------------


def test_mistakes_are_plain_errors_and_leave_nothing(tmp_path):
    before = traces()
    with pytest.raises(ValueError, match="`data_parallel_size` must be between 1 and 64, got 0"):
        LLM(TINY, data_parallel_size=0)
    with pytest.raises(ValueError, match="neither"):
        LLM(str(tmp_path / "none"), **DP2)
    assert traces() == before


@pytest.mark.slow
def test_mistakes_that_replicas_find_are_plain_errors(checkpoint):
    before = traces()
    with pytest.raises(ValueError, match="flash_attn"):
        within_deadline(lambda: LLM(checkpoint, attention_backend="flash_attn", **PLAIN))
    assert traces() == before


def test_replica_that_cannot_start_is_an_error(monkeypatch):
    before = traces()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"replica [01] ended with exit code 1"):
        within_deadline(lambda: LLM(TINY, **DP2))
    assert traces() == before


def test_ctrl_c_drops_the_call_and_leaves_the_engine_usable(two, one, monkeypatch):
    step = two.core.step

    def press():
        step()
        if two.core.metrics.num_sampled_tokens > sampled + 20:
            signal.raise_signal(signal.SIGINT)

    sampled = two.core.metrics.num_sampled_tokens
    monkeypatch.setattr(two.core, "step", press)
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert two.is_finished()
    found = two.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_same(found, one.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert two.metrics()["num_running"] == 0


@pytest.mark.slow
def test_exit_with_requests_leaves_nothing(checkpoint):
    before = traces()
    llm = LLM(checkpoint, **PLAIN)
    stream = llm.stream([[1, 2], [3, 4]], GREEDY)  # with requests in the replicas
    next(stream)
    assert len(children()) >= 2
    llm.exit()
    llm.exit()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        list(stream)
    assert traces() == before


PARENT = """
import os, signal, sys
from nanovllm import LLM
llm = LLM({path!r}, **{options})
print(*(each.process.pid for each in llm.executor._replicas.values()), flush=True)
{end}
"""


@pytest.mark.slow  # they live as workers do, of which test_workers.py kills parents
@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(3)", 3)]
)
def test_dead_parent_leaves_nothing(end, code, checkpoint):
    script = PARENT.format(path=str(checkpoint), options=PLAIN, end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    started = [int(pid) for pid in done.stdout.split()]
    assert len(started) == 2
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


def test_forked_process_has_no_engine(two):
    pid = os.fork()
    if not pid:
        try:
            two.generate("1+1=")
        except RuntimeError:
            two.exit()  # does nothing there
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert two.generate("1+1=", GREEDY, use_tqdm=False)[0].outputs[0].text


# -- timelines -------------------------------------------------------------------------------------


@pytest.mark.slow  # of one engine, test_timeline.py has it
def test_replicas_record_to_one_file(checkpoint, tmp_path):
    """Each as a process of its own, by one clock; a restarted one, too."""
    path, prompts = tmp_path / "trace.json", [[i, i + 1] for i in range(18)]
    with LLM(checkpoint, **PLAIN, trace=str(path)) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.metrics()
        killed_at = time.perf_counter() * 1e6  # the clock of all processes
        os.kill(pids(llm)[0], signal.SIGKILL)
        within_deadline(lambda: until_restarted(llm))
        again = llm.generate(prompts, DRAWN, use_tqdm=False)
        seconds = sum(output.metrics.total_seconds for output in again)
    events = json.loads(path.read_text())
    names = [e for e in events if e["name"] == "process_name"]
    assert sorted((e["pid"], e["args"]["name"]) for e in names) == [
        *((0, "replica 0"), (0, "replica 0"), (1, "replica 1"))
    ]
    early = [e for e in events if e.get("cat") == "step" and e["ts"] < killed_at]
    assert {e["pid"] for e in early} == {0, 1}
    assert sum(e["args"]["sampled_tokens"] for e in early) == metrics["num_sampled_tokens"]
    assert len(early) == metrics["num_steps"]
    assert sum(e["dur"] for e in early) / 1e6 == pytest.approx(metrics["step_seconds"], rel=1e-6)
    late = [e for e in events if e["name"] == "request" and e["ts"] > killed_at]
    assert {e["pid"] for e in late} == {0, 1}
    ends = [e["ts"] if e["ph"] == "e" else -e["ts"] for e in late]
    assert sum(ends) / 1e6 == pytest.approx(seconds, abs=1e-3)


def until_restarted(llm):
    def is_restarted():
        llm.step()
        return llm.executor.num_restarts > 0 and len(llm.executor.ready) == 2

    wait_until(is_restarted)
