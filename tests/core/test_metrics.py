"""Counters and histograms of times: by hand, against numpy, and whatever happens to the requests.

Times are those of a clock that only the scripted model moves, or are compared with each other.
"""

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    assert_idle,
    greedy,
    rare,
)
from nanovllm import LLM, SamplingParams
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.outputs import RequestMetrics
from nanovllm.tracing.histogram import BOUNDS, Histogram
from nanovllm.tracing.metrics import Latencies, Metrics

RESOLUTION = 1.048  # of a percentile, as documented
REQUEST_TIMES = ("queue_seconds", "first_token_seconds", "seconds_per_token", "total_seconds")
STOP = 7
TWICE = SamplingParams(max_tokens=3, n=2)


@pytest.fixture
def llm(either_llm):
    """Without and with overlap."""
    return either_llm


# -- the histogram --------------------------------------------------------------------------------


def histogram_of(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


def test_bounds_are_evenly_apart():
    bounds = BOUNDS[:-1]
    assert (bounds[0], bounds[-1]) == pytest.approx((1e-5, 1e3))
    assert all(1 < b / a < RESOLUTION for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("count", [1, 2, 997, 10_007])
@pytest.mark.parametrize("spread", ["lognormal", "uniform", "two-peaks", "constant"])
def test_percentiles_are_those_of_numpy(spread, count):
    rng = np.random.default_rng(count)
    values = {
        "lognormal": np.exp(rng.normal(-5, 1.5, count)),
        "uniform": rng.uniform(1e-5, 2.0, count),
        "two-peaks": rng.choice([0.0011, 0.9], count) * rng.uniform(1, 1.2, count),
        "constant": np.full(count, 0.0123),
    }[spread].clip(1e-5, 1e3)
    histogram = histogram_of(values.tolist())
    assert histogram.count == count
    assert histogram.sum == pytest.approx(values.sum())
    assert histogram.mean == pytest.approx(values.mean())
    assert histogram.max == values.max()
    for p in (0.1, 1, 25, 50, 90, 99, 99.9, 100):
        exact = np.percentile(values, p, method="inverted_cdf")
        assert exact <= histogram.percentile(p) <= exact * RESOLUTION, p
    assert histogram.percentile(100) == values.max()


def test_percentiles_at_the_bounds_and_beyond():
    assert histogram_of([0.0, 1e-7]).percentile(100) == 1e-7, "no more than the maximum"
    assert histogram_of([1e-7, 1.0]).percentile(50) == BOUNDS[0]
    assert histogram_of([2e3, 5e4]).percentile(1) == 5e4, "beyond the bounds nothing is resolved"
    for bound in BOUNDS[:-1]:
        assert histogram_of([bound, 1e9]).percentile(50) == bound, "bounds belong to their bucket"
    ranks = histogram_of([1.0] * 90 + [10.0] * 9 + [100.0])
    assert [round(ranks.percentile(p)) for p in (90, 90.5, 99, 99.5)] == [1, 10, 10, 100]


@pytest.mark.parametrize("p", [0, -1, 100.1])
def test_no_percentage_is_refused(p):
    with pytest.raises(AssertionError, match="percentage"):
        histogram_of([1.0]).percentile(p)


def test_empty_histogram_says_nothing():
    values = Histogram().as_dict()
    assert values.pop("count") == 0
    assert values == dict.fromkeys(["mean", "p50", "p90", "p99", "max"])


# -- by hand --------------------------------------------------------------------------------------


class ScriptedSteps:
    """A model and the time: a step that prefills takes 2 s, one that decodes 0.5 s.

    A completion of `stops` ([prompt token, length]) ends with STOP at that length.
    """

    def __init__(self, monkeypatch, llm, stops=()):
        self.now, self.stops = 100.0, dict(stops)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(llm.executor, "run", self.run)

    def run(self, scheduled, known):
        self.now += 0.5 if all(item.is_decode for item in scheduled) else 2.0
        seqs = [item.seq for item in scheduled if item.samples]
        return PendingTokens(torch.tensor([self.token(seq) for seq in seqs]))

    def token(self, seq):
        return STOP if self.stops.get(seq.token_ids[0]) == seq.num_completion_tokens + 1 else 1


def scripted_llm(checkpoint, **options):
    return LLM(checkpoint, overlap=False, **{**SMALL, **options})


def of(metrics, **expected):
    """Values of `metrics` under the names in `expected`."""
    return {name: metrics[name] for name in expected}


def test_a_run_counted_by_hand(checkpoint, monkeypatch):
    with scripted_llm(checkpoint) as llm:
        clock = ScriptedSteps(monkeypatch, llm, {20: 2})
        prompts = [[10] * 40, [20] * 20]
        params = [greedy(3), greedy(5, stop_token_ids=[STOP])]
        ids = [llm.add_request(*item) for item in zip(prompts, params, strict=True)]
        clock.now += 1.0
        assert llm.step() == []
        # a token on from the prompts, which fill 2.5 and 1.25 blocks of 16
        assert llm.metrics()["kvcache_usage"] == (3 + 2) / 32
        assert llm.metrics()["num_finished"] == llm.metrics()["total_seconds"]["count"] == 0
        [stopped] = llm.step()
        [ended] = llm.step()
        assert [ended.request_id, stopped.request_id] == ids
        assert ended.metrics == RequestMetrics(1.0, 3.0, 4.0, 0, 1.0, 2)
        assert stopped.metrics == RequestMetrics(1.0, 3.0, 3.5, 0, 0.5, 1)
        [single] = llm.generate([10] * 40, greedy(1), use_tqdm=False)
        assert single.metrics == RequestMetrics(0.0, 2.0, 2.0, 0, 0.0, 0)
        times = [o.metrics.seconds_per_token for o in (ended, stopped, single)]
        assert times == [0.5, 0.5, None]
        expected = {
            "num_steps": 4,
            "num_prefill_tokens": 60 + 8,
            "num_decode_tokens": 2 + 1,
            "num_sampled_tokens": 3 + 2 + 1,
            "prefill_seconds": 2 * 2.0,
            "decode_seconds": 2 * 0.5,
            "step_seconds": 2 * 2.0 + 2 * 0.5,
            "num_finished": 3,
            "num_aborted": 0,
            "num_finished_by_stop": 1,
            "num_finished_by_length": 2,
            "num_generated_tokens": 3 + 2 + 1,
            "num_prompt_tokens": 40 + 20 + 40,
            "num_cached_tokens": 32,
            "prefix_cache_hit_rate": 0.32,
            "kvcache_usage": 0.0,
        }
        metrics = llm.metrics()
        assert of(metrics, **expected) == expected
        found = {name: metrics[name] for name in vars(Latencies())}
        facts = {name: (h["count"], h["mean"], h["max"]) for name, h in found.items()}
        assert facts == {
            "prefill_step_seconds": (2, 2.0, 2.0),
            "decode_step_seconds": (2, 0.5, 0.5),
            "queue_seconds": (3, 2 / 3, 1.0),
            "first_token_seconds": (3, 8 / 3, 3.0),
            "seconds_per_token": (2, 0.5, 0.5),
            "total_seconds": (3, 9.5 / 3, 4.0),
        }


def test_several_completions_are_one_request(checkpoint, monkeypatch):
    """The second waits for the block they share, so its tokens come a step later."""
    with scripted_llm(checkpoint) as llm:
        ScriptedSteps(monkeypatch, llm)
        [output] = llm.generate([10] * 20, TWICE, use_tqdm=False)
        # first tokens after 2 s and 4 s, last ones after 4.5 s and 5 s
        assert output.metrics == RequestMetrics(0.0, 2.0, 5.0, 0, 2.5 + 1.0, 2 + 2)
        assert output.metrics.seconds_per_token == 3.5 / 4
        expected = {
            "num_finished": 1,
            "num_finished_by_length": 2,
            "num_generated_tokens": 6,
            "num_prompt_tokens": 40,
            "num_cached_tokens": 16,
            "prefix_cache_hit_rate": 0.4,
        }
        metrics = llm.metrics()
        assert of(metrics, **expected) == expected
        assert [metrics[name]["count"] for name in REQUEST_TIMES] == [1] * 4


def test_a_request_with_completions_that_ended_can_be_aborted(checkpoint, monkeypatch):
    with scripted_llm(checkpoint) as llm:
        ScriptedSteps(monkeypatch, llm)
        request_id = llm.add_request([10] * 20, TWICE)
        for _ in range(3):
            assert llm.step() == []
        assert len(llm.scheduler.running) == 1, "one of them has ended"
        assert llm.abort(request_id)
        assert_idle(llm)
        metrics = llm.metrics()
        expected = {"num_aborted": 1, "num_finished": 0, "num_generated_tokens": 0, "num_steps": 3}
        assert of(metrics, **expected) == expected
        assert [metrics[name]["count"] for name in REQUEST_TIMES] == [0] * 4


def test_preemption_keeps_a_requests_times(checkpoint, monkeypatch):
    """Queued once, its first token once; what it waits later is time of its tokens."""
    with scripted_llm(checkpoint, num_kvcache_blocks=3) as llm:
        ScriptedSteps(monkeypatch, llm)
        monkeypatch.setattr(llm.scheduler.lengths, "remaining", lambda seq: 1)
        first, second = llm.generate([[10] * 15, [20] * 15], greedy(4), use_tqdm=False)
        # The third token of each needs a second block, and one is left. The first ends after
        # three decodes; then the second resumes from its first block, and decodes twice.
        assert first.metrics == RequestMetrics(0.0, 2.0, 3.5, 0, 1.5, 3)
        assert second.metrics == RequestMetrics(0.0, 2.0, 4.5, 1, 2.5, 3)
        metrics = llm.metrics()
        expected = {"num_finished": 2, "num_prompt_tokens": 30, "num_generated_tokens": 8}
        assert of(metrics, **expected) == expected
        assert [metrics[name]["count"] for name in REQUEST_TIMES] == [2] * 4
        assert metrics["num_cached_tokens"] == 0, "its own blocks are no hits"


def test_times_of_steps_add_up_to_the_time(checkpoint, monkeypatch):
    """Also with overlap, where a step is launched before the one ahead of it has been booked."""
    with LLM(checkpoint, overlap=True, **SMALL) as llm:
        now, launched_at, run = 0.0, [], llm.executor.run

        def clock():
            nonlocal now
            now += 1
            return now

        def launched(*args):
            launched_at.append(now)
            return run(*args)

        monkeypatch.setattr(time, "perf_counter", clock)
        monkeypatch.setattr(llm.executor, "run", launched)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        metrics, booked_at = llm.metrics(), llm.core._booked_at
    assert metrics["num_steps"] == len(launched_at) > 10
    assert metrics["step_seconds"] == booked_at - launched_at[0]


class Bar:
    """Takes the place of tqdm, and keeps the rates that the newest one shows."""

    disable = False
    shown: list[dict[str, int]]

    def __init__(self, **options):
        Bar.shown = []

    def set_postfix(self, rates, refresh):
        Bar.shown.append({name: int(text.removesuffix(" tok/s")) for name, text in rates.items()})

    def update(self, num_finished):
        pass

    def close(self):
        pass


LOADS = {  # 64 tokens a step
    "prefill": ([[1] * 50, [2] * 20, [3] * 90], [greedy(1)] * 3),
    "decode": ([[1], [2], [3]], [greedy(40)] * 3),
    "mixed": ([[1] * 8, [2] * 8, [3] * 90, [4] * 110], [greedy(9), *[greedy(7)] * 2, greedy(1)]),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("name", LOADS)
def test_rates_are_true(name, overlap, checkpoint, monkeypatch):
    """28,407 tokens decoded a second were shown where 300 came: those of mixed steps counted, and
    their time did not.
    """
    prompts, params = LOADS[name]
    monkeypatch.setattr("nanovllm.tracing.metrics.tqdm", Bar)
    with LLM(checkpoint, overlap=overlap, **SMALL) as llm:
        clock, steps, ends = ScriptedSteps(monkeypatch, llm), [], []
        ended = iter(ends)

        def run(scheduled, known):
            prompt = sum(
                min(item.start + item.num_tokens, item.seq.num_prompt_tokens) - item.start
                for item in scheduled
                if item.start < item.seq.num_prompt_tokens
            )
            decoded = sum(item.num_tokens for item in scheduled) - prompt
            seqs = [item.seq for item in scheduled if item.samples]
            seconds = 2.0 if prompt else 0.5
            steps.append((prompt, decoded, len(seqs), seconds))
            ends.append(max([clock.now, *ends[-1:]]) + seconds)  # on a device, a step at a time
            return PendingTokens(torch.tensor([clock.token(seq) for seq in seqs]))

        def wait(tokens):
            clock.now = max(clock.now, next(ended))
            return tokens.wait()

        monkeypatch.setattr(llm.executor, "run", run)
        monkeypatch.setattr(llm.executor, "wait", wait)
        outputs = llm.generate(prompts, params)
        shown, metrics = Bar.shown, llm.metrics()
    prompt, decoded, sampled, seconds = zip(*steps, strict=True)
    num_mixed = sum(p > 0 < d for p, d in zip(prompt, decoded, strict=True))
    assert (num_mixed >= 3) if name == "mixed" else not num_mixed
    assert sum(prompt) == sum(map(len, prompts))
    assert sum(sampled) == sum(len(output["token_ids"]) for output in outputs)
    if not overlap:
        assert len(shown) == len(steps)
        for n, rates in enumerate(shown, start=1):
            assert rates == {
                "input": round(sum(prompt[:n]) / sum(seconds[:n])),
                "output": round(sum(sampled[:n]) / sum(seconds[:n])),
            }
    totals = {"input": sum(prompt), "output": sum(sampled)}
    assert shown[-1] == {kind: round(n / sum(seconds)) for kind, n in totals.items()}
    expected = {
        "num_prefill_tokens": sum(prompt),
        "num_decode_tokens": sum(decoded),
        "num_sampled_tokens": sum(sampled),
        "prefill_seconds": sum(s for n, s in zip(prompt, seconds, strict=True) if n),
        "decode_seconds": sum(s for n, s in zip(decoded, seconds, strict=True) if n),
        "step_seconds": sum(seconds),
    }
    assert of(metrics, **expected) == expected


def test_since_subtracts_counters():
    earlier = Metrics(num_steps=2, decode_seconds=0.5, num_aborted=1)
    later = replace(earlier, num_steps=5, decode_seconds=2.0, num_generated_tokens=4)
    assert later.since(earlier) == Metrics(
        num_steps=3, decode_seconds=1.5, num_generated_tokens=4, num_aborted=0
    )


# -- real runs ------------------------------------------------------------------------------------


def assert_consistent(metrics, outputs):
    """Check that the engine's totals equal the sums over its outputs."""
    completions = [completion for output in outputs for completion in output.outputs]
    reasons = [completion.finish_reason for completion in completions]
    expected = {
        "num_finished": len(outputs),
        "num_finished_by_stop": reasons.count("stop"),
        "num_finished_by_length": reasons.count("length"),
        "num_generated_tokens": sum(len(completion.token_ids) for completion in completions),
        "num_prompt_tokens": sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs),
    }
    assert of(metrics, **expected) == expected
    for name in REQUEST_TIMES:
        values = [getattr(output.metrics, name) for output in outputs]
        values = [value for value in values if value is not None]
        found = metrics[name]
        assert found["count"] == len(values)
        assert found["mean"] == pytest.approx(np.mean(values))
        assert found["max"] == max(values)
        for p in (50, 90, 99):
            exact = np.percentile(values, p, method="inverted_cdf")
            assert exact <= found[f"p{p}"] <= max(exact * RESOLUTION, BOUNDS[0])
    for kind in ("prefill", "decode"):
        steps, seconds = metrics[f"{kind}_step_seconds"], metrics[f"{kind}_seconds"]
        assert 0 < steps["count"] <= metrics["num_steps"]
        assert steps["mean"] * steps["count"] == pytest.approx(seconds)
        assert seconds <= metrics["step_seconds"] * (1 + 1e-9)
    for name in vars(Latencies()):
        found = metrics[name]
        assert 0 <= found["p50"] <= found["p90"] <= found["p99"] <= found["max"]
        assert found["mean"] <= found["max"]
    for output in outputs:
        times = output.metrics
        assert 0 <= times.queue_seconds < times.first_token_seconds <= times.total_seconds
        assert times.num_decode_tokens == sum(len(c.token_ids) - 1 for c in output.outputs)
        if len(output.outputs) == 1:
            decoding = times.total_seconds - times.first_token_seconds
            assert times.decode_seconds == pytest.approx(decoding)


def test_engine_and_outputs_agree(llm):
    """Prompts in chunks, hits of the prefix cache, single tokens, several completions, stops."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    stop = replace(PARAMS[2], stop_token_ids=[outputs[2]["token_ids"][5]])
    params = [*PARAMS[:2], stop, replace(PARAMS[3], n=3, temperature=1.0), PARAMS[4]]
    outputs += llm.generate(PROMPTS, params, use_tqdm=False)
    metrics = llm.metrics()
    assert_consistent(metrics, outputs)
    assert metrics["num_finished_by_stop"] == 1
    assert sum(output.num_cached_tokens for output in outputs) == metrics["num_cached_tokens"] > 0
    hit_rate = metrics["num_cached_tokens"] / metrics["num_prompt_tokens"]
    assert metrics["prefix_cache_hit_rate"] == hit_rate
    llm.reset_prefix_cache()
    assert llm.metrics() == metrics


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_preempted_requests_count_once(overlap, checkpoint, monkeypatch):
    with LLM(checkpoint, overlap=overlap, **{**SMALL, "num_kvcache_blocks": 8}) as llm:
        # as if every request ended soon, so that too many are admitted
        monkeypatch.setattr(llm.scheduler.lengths, "remaining", lambda seq: 1)
        outputs = llm.generate([[i + 1] * 17 for i in range(4)], greedy(40), use_tqdm=False)
        metrics = llm.metrics()
        assert_consistent(metrics, outputs)
        assert metrics["num_preemptions"] == sum(o.metrics.num_preemptions for o in outputs) > 1
        assert metrics["num_cached_tokens"] == 0, "their own blocks are no hits"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 30])
def test_aborted_requests_are_counted_apart(num_steps, llm):
    ids = [llm.add_request(*item) for item in zip(PROMPTS, PARAMS, strict=True)]
    outputs = [output for _ in range(num_steps) for output in llm.step()]
    done = {output.request_id for output in outputs}
    for request_id in ids[1:]:
        assert llm.abort(request_id) is (request_id not in done)
        assert not llm.abort(request_id), "which counts nothing"
    num_aborted = len(set(ids[1:]) - done)
    assert (num_aborted == 0) == (num_steps == 30)
    while not llm.is_finished():
        outputs += llm.step()
    metrics = llm.metrics()
    assert metrics["num_aborted"] == num_aborted
    assert_consistent(metrics, outputs)
    assert len(outputs) + num_aborted == len(ids)


def test_a_step_that_fails_and_is_repeated_counts_once(llm, monkeypatch):
    run, calls = llm.model_runner.launch, itertools.count()

    def failing(*args, **kwargs):
        if next(calls) in (0, 2, 5):
            raise RuntimeError("out of memory")
        return run(*args, **kwargs)

    monkeypatch.setattr(llm.model_runner, "launch", failing)
    num_failures, outputs = 0, []
    for item in zip(PROMPTS, PARAMS, strict=True):
        llm.add_request(*item)
    while not llm.is_finished():
        try:
            outputs += llm.step()
        except RuntimeError:
            num_failures += 1
    metrics = llm.metrics()
    assert num_failures == 3
    assert metrics["num_steps"] == next(calls) - num_failures
    assert metrics["num_aborted"] == 0
    assert_consistent(metrics, outputs)


@pytest.mark.parametrize("point", ["schedule", "postprocess", "advance"])
@pytest.mark.parametrize("k", [1, rare(3), 9])
def test_requests_lost_to_an_error_count_as_aborted(point, k, llm, monkeypatch):
    """After Ctrl-C in the books, each request has ended either way, and none both ways."""
    original, calls, outputs = getattr(llm.scheduler, point), itertools.count(1), []

    def interrupted(*args):
        result = original(*args)
        if next(calls) == k:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(llm.scheduler, point, interrupted)
    for item in zip(PROMPTS, PARAMS, strict=True):
        llm.add_request(*item)
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs += llm.step()
    assert_idle(llm)
    assert llm.metrics()["num_aborted"] == len(PROMPTS) - len(outputs) > 0
    outputs += llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_consistent(llm.metrics(), outputs)


def test_metrics_are_json(llm):
    for _ in range(2):  # of an engine that has done nothing, too
        metrics = llm.metrics()
        assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
