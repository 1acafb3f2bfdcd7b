"""`LLM.stream` and listeners: what they give, how they end, and who runs beside them."""

import gc

import pytest

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    assert_idle,
    assert_usable,
    facts,
    gather,
    greedy,
    in_threads,
    play,
    rare,
    reference,
    references,
    run_steps,
)
from faults import FAULT_POINTS, fail_at
from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams


@pytest.fixture
def llm(either_llm):
    """Without and with overlap."""
    return either_llm


# -- what it gives --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[rare(False), True], ids=["synchronous", "overlap"])
def tiny_llm(request):
    with LLM(TINY, overlap=request.param, **SMALL) as llm:
        yield llm


def wild(seed, max_tokens=30, **options):
    """Bytes at random: characters of all lengths, wrong bytes and special tokens."""
    options = {"temperature": 3.0, "ignore_eos": True, **options}
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)


def assert_same(llm, prompts, params):
    """Streamed as generated. Returns the completions."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()  # the same steps: log-probabilities are equal to the last bit
    streamed = gather(llm.stream(prompts, params))
    llm.reset_prefix_cache()
    wholes = [[facts(done) for done in output.outputs] for output in outputs]
    assert [streamed[i] for i in sorted(streamed)] == wholes
    assert_idle(llm)
    return wholes


def test_increments_are_the_whole(tiny_llm):
    """Prompts in chunks, more sequences than run at once, several completions."""
    prompts = ["a", "Ein längerer Satz. " * 5, [7] * 20, list(range(90)), "日本", [7] * 20]
    params = [wild(i, 20 + 3 * i, n=1 + i % 3, logprobs=i % 2 or None) for i in range(len(prompts))]
    wholes = assert_same(tiny_llm, prompts, params)
    text = "".join(done[1] for one in wholes for done in one)
    assert "\ufffd" in text and any(ord(char) > 127 and char != "\ufffd" for char in text)
    assert [done[5] is not None for one in wholes for done in one].count(True) == 2 + 1 + 3
    plain = [wild(i, skip_special_tokens=False) for i in range(len(prompts))]
    assert "<|im_" in str(assert_same(tiny_llm, prompts, plain))


def test_stop_strings_of_random_texts(tiny_llm):
    """Some that occur, some that only begin, across whatever the tokens are."""
    prompts, free = [[i + 1] for i in range(5)], [wild(i, 25, n=2) for i in range(5)]
    texts = [done[1] for one in assert_same(tiny_llm, prompts, free) for done in one]
    assert all(len(text) > 10 for text in texts)
    for include in (False, True):
        params = [
            wild(
                i,
                25,
                n=2,
                stop=[texts[2 * i][8:11], texts[2 * i + 1][3:6] + "nowhere"],
                include_stop_str_in_output=include,
            )
            for i in range(5)
        ]
        for i, (first, _) in enumerate(assert_same(tiny_llm, prompts, params)):
            stop = texts[2 * i][8:11]
            assert first[3:5] == ("stop", stop)
            assert first[1].endswith(stop) if include else stop not in first[1]


def test_text_is_held_back_no_longer_than_needed(tiny_llm, monkeypatch):
    script = [*"é<s<stzé<stop>".encode()]
    expected = ["", "é", "", "", "<s", "", "", "<stz", "", "é", "", "", "", "", "", ""]
    play(monkeypatch, tiny_llm, [script])
    outputs = list(tiny_llm.stream("a", greedy(30, stop=["<stop>"])))
    assert [len(output["token_ids"]) for output in outputs] == [1] * len(script)
    assert [output["text"] for output in outputs] == expected


def test_fields_of_increments(tiny_llm):
    prompt = list(range(90))  # in chunks: the first step has no news
    params = greedy(3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    first, second, last = tiny_llm.stream({"prompt_token_ids": prompt}, params)
    for output in (first, second, last):
        assert (output.prompt, output.prompt_token_ids) == (None, prompt)
        assert len(output["token_ids"]) == len(output.outputs[0].logprobs) == 1
        assert output["token_ids"][0] in output.outputs[0].logprobs[0]
        assert len(output.prompt_logprobs) == 90
        assert output.request_id == first.request_id
    assert [output.finished for output in (first, second, last)] == [False, False, True]
    assert [o.outputs[0].finish_reason for o in (first, second, last)] == [None, None, "length"]
    assert first.metrics is second.metrics is None
    assert last.metrics.total_seconds >= last.metrics.first_token_seconds > 0


def test_news_come_as_they_are_there(llm):
    """One output for each step and prompt, and never a token later than `step` books it."""
    stream = llm.stream([PROMPT, PROMPT[::-1]], greedy(5))
    seen = [(output.request_id, output["token_ids"]) for output in stream]
    assert [len(tokens) for _, tokens in seen] == [1] * 10
    assert [i for i, _ in seen] == [seen[0][0], seen[1][0]] * 5
    assert seen[0][0] < seen[1][0]
    lookahead = llm.metrics()["overlap"]
    before = llm.metrics()["num_steps"]
    later = llm.stream(PROMPT, greedy(5))
    next(later)
    assert llm.metrics()["num_steps"] == before + 1
    assert len(llm.core.in_flight) == int(lookahead)


def test_without_tokenizer_or_text(llm, tiny_llm):
    assert gather(llm.stream([PROMPT], greedy(4))).popitem()[1][0][1] == ""
    [(_, [whole])] = gather(tiny_llm.stream("a", greedy(4, detokenize=False))).items()
    assert whole[1] == "" and len(whole[2]) == 4
    assert list(llm.stream([])) == []


# -- how it ends ----------------------------------------------------------------------------------


def leave_by_break(stream, count):
    for i, _ in enumerate(stream):
        if i + 1 == count:
            break


def leave_by_close(stream, count):
    for _ in range(count):
        next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_error(stream, count):
    with pytest.raises(KeyError, match="the caller's"):
        for i, _ in enumerate(stream):
            if i + 1 == count:
                raise KeyError("the caller's")


def leave_to_the_garbage(stream, count):
    for _ in range(count):
        next(stream)
    cycle = [stream]
    cycle.append(cycle)


LEAVE = [leave_by_break, leave_by_close, leave_by_error, leave_to_the_garbage]


@pytest.mark.parametrize("count", [1, 4, 12])
@pytest.mark.parametrize("leave", LEAVE)
def test_left_early(leave, count, llm, checkpoint):
    """Some prompts wait, one is in its chunks, some have ended."""
    leave(llm.stream(PROMPTS * 3, PARAMS * 3), count)
    gc.collect()
    assert_usable(llm, checkpoint)
    assert llm.reset_prefix_cache() is None


def test_never_started(llm, checkpoint):
    stream = llm.stream(PROMPTS, PARAMS)
    assert_usable(llm, checkpoint)
    stream.close()
    del stream
    llm.stream(PROMPTS, PARAMS)
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("where", ["schedule", "advance", "postprocess", "abort"])
def test_garbage_collected_within_a_step(where, llm, checkpoint, monkeypatch):
    """Its end came in the middle of another call's work on the books, in the same thread."""
    leave_to_the_garbage(llm.stream([[i] * 20 for i in range(3)], greedy(20)), 3)
    original, calls = getattr(llm.scheduler, where), []

    def collecting(*args):
        result = original(*args)
        calls.append(gc.collect())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, where, collecting)
        stream = llm.stream(PROMPTS, PARAMS)
        next(stream)
        if where == "abort":
            assert not llm.abort(10**9) and llm.abort(llm.add_request(PROMPT))
        assert calls
        whole = gather(stream)
    assert [len(done) for done in whole.values()] == [1] * len(PROMPTS)
    assert_usable(llm, checkpoint)


def test_exit_while_it_runs(checkpoint):
    for overlap in (False, True):
        llm = LLM(checkpoint, overlap=overlap, **SMALL)
        stream, unused = llm.stream(PROMPTS, PARAMS), llm.stream(PROMPTS, PARAMS)
        next(stream)
        llm.exit()
        for rest in (stream, unused):
            with pytest.raises(RuntimeError, match="this engine is closed"):
                list(rest)
            assert list(rest) == []
        with pytest.raises(RuntimeError, match="this engine is closed"):
            llm.stream(PROMPTS)


WRONG = {
    "prompt": lambda llm: llm.stream([PROMPT, []]),
    "prompts": lambda llm: llm.stream(7),
    "text": lambda llm: llm.stream([PROMPT, "text"]),
    "params": lambda llm: llm.stream([PROMPT], "greedy"),
    "count": lambda llm: llm.stream([PROMPT], PARAMS),
    "stop": lambda llm: llm.stream([PROMPT], greedy(3, stop=["x"])),
    "token": lambda llm: llm.stream([PROMPT], greedy(3, stop_token_ids=[10**6])),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_at_the_call(name, llm, checkpoint):
    with pytest.raises((TypeError, ValueError)):
        WRONG[name](llm)
    assert_usable(llm, checkpoint)


def test_wrong_grammar_is_told_at_the_call(tiny_llm):
    """It came with the first output, when the prompts before it had been queued."""
    pytest.importorskip("llguidance")
    wrong = greedy(3, structured_outputs=StructuredOutputsParams(regex="("))
    for call in (tiny_llm.stream, tiny_llm.generate):
        with pytest.raises(ValueError, match="`regex` must be"):
            call(["a", "b"], [greedy(3), wrong])
        assert_idle(tiny_llm)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "after", "error"),
    [rare(1, False, RuntimeError("out of memory")), (3, True, KeyboardInterrupt())],
    ids=["first", "after-third"],
)
@pytest.mark.parametrize("point", sorted(set(FAULT_POINTS) - {"output"}))
def test_error_in_a_step_reaches_the_loop(point, k, after, error, llm, checkpoint, monkeypatch):
    with monkeypatch.context() as patch:
        calls = fail_at(patch, *FAULT_POINTS[point](llm), k, error, after=after)
        stream = llm.stream(PROMPTS, PARAMS)
        with pytest.raises(type(error)):
            list(stream)
        assert len(calls) == k
        assert list(stream) == []
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("point", ["launch", "postprocess"])
def test_error_in_another_stream(point, llm, checkpoint, monkeypatch):
    """A step that failed is repeated; books that are not to be trusted drop all requests."""
    ours, theirs = llm.stream(PROMPT, greedy(9)), llm.stream(PROMPT[::-1], greedy(9))
    tokens = next(ours)["token_ids"] + next(ours)["token_ids"]
    next(theirs)
    with monkeypatch.context() as patch:
        fail_at(patch, *FAULT_POINTS[point](llm), 1, RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            list(theirs)
    if point == "launch":
        assert tokens + [t for o in ours for t in o["token_ids"]] == reference(
            checkpoint, PROMPT, 9
        )
    else:
        llm.add_request(PROMPT, greedy(50))  # nobody steps for it
        with pytest.raises(RuntimeError, match="dropped by an error in another call"):
            list(ours)
        assert not llm.is_finished()
        run_steps(llm)
    assert_usable(llm, checkpoint)


def test_aborted_by_the_caller(llm, checkpoint):
    stream = llm.stream([PROMPT, PROMPT[::-1]], greedy(9))
    first = next(stream).request_id
    assert llm.abort(first)
    tokens = []
    with pytest.raises(RuntimeError, match="have been aborted"):
        for output in stream:
            tokens += output["token_ids"]
            assert output.request_id != first
    assert tokens == reference(checkpoint, PROMPT[::-1], 9)
    assert_usable(llm, checkpoint)


# -- beside others --------------------------------------------------------------------------------


def test_two_at_once(llm, checkpoint):
    """Also when one is ahead: what the other's steps bring is kept for it."""
    first, second = llm.stream(PROMPTS, PARAMS), llm.stream(PROMPTS[::-1], PARAMS[::-1])
    seen = [[], []]
    for _ in range(3):
        seen[1].append(next(second))
    while len(seen[0]) < 20:
        seen[0].append(next(first))
    seen[1] += second
    seen[0] += first
    expected = references(checkpoint)
    for outputs, wanted in zip(seen, [expected, expected[::-1]], strict=True):
        whole = gather(outputs)
        assert [whole[i][0][2] for i in sorted(whole)] == wanted
    assert_usable(llm, checkpoint)


def test_beside_steps(llm, checkpoint):
    """Each gets its own: neither takes what the other's steps finish."""
    expected = references(checkpoint)
    early = llm.add_request(PROMPTS[0], PARAMS[0])
    stream, outputs, done = llm.stream(PROMPTS, PARAMS), [], {}
    for turn, output in enumerate(stream):
        outputs.append(output)
        if turn == 2:
            late = llm.add_request(PROMPTS[2], PARAMS[2])
        if turn % 3 == 0:
            done.update((o.request_id, o["token_ids"]) for o in llm.step())
    assert llm.is_finished() is (len(done) == 2)
    done.update(run_steps(llm))
    assert done == {early: expected[0], late: expected[2]}
    whole = gather(outputs)
    assert [whole[i][0][2] for i in sorted(whole)] == expected
    assert_usable(llm, checkpoint)


def test_steps_that_another_does(llm, checkpoint):
    """The stream only picks up what there is, also when all has ended."""
    stream = llm.stream([PROMPT], greedy(6))
    first = next(stream)
    assert run_steps(llm) == {}
    assert_idle(llm)
    steps = llm.metrics()["num_steps"]
    whole = gather([first, *stream])
    assert whole[first.request_id][0][2] == reference(checkpoint, PROMPT, 6)
    assert llm.metrics()["num_steps"] == steps


def test_generate_is_refused_while_it_runs(llm, checkpoint):
    stream = llm.stream(PROMPTS, PARAMS)
    outputs = [next(stream)]
    refusal = r"without other requests, but some of stream\(\) or add_request\(\) are left"
    with pytest.raises(RuntimeError, match=refusal):
        llm.generate([PROMPT], use_tqdm=False)
    with pytest.raises(RuntimeError, match=r"reset_prefix_cache\(\) needs .* without requests"):
        llm.reset_prefix_cache()
    whole = gather([*outputs, *stream])
    assert [whole[i][0][2] for i in sorted(whole)] == references(checkpoint)
    assert_usable(llm, checkpoint)


def test_abort_all(llm, checkpoint):
    """Also what a stream asked for that cannot be left any more, and results nobody fetched."""
    stream = llm.stream(PROMPTS, PARAMS)
    next(stream)
    llm.add_request(PROMPT, greedy(1))
    while not llm.core.finished:
        next(stream)
    llm.add_request(PROMPT, greedy(None))
    before = llm.metrics()["num_aborted"]
    llm.abort_all()
    assert llm.is_finished() and llm.metrics()["num_aborted"] > before
    with pytest.raises(RuntimeError, match="requests of this stream have been aborted"):
        list(stream)
    assert llm.step() == []
    assert_idle(llm)
    assert_usable(llm, checkpoint)


def test_threads_stream_at_once(llm, checkpoint):
    results = {}

    def work(i):
        for turn in range(3):
            prompts = [[i + 1, turn, *PROMPT], [turn + 1] * (i + 15)]
            next(llm.stream(prompts, greedy(9)))  # and leave it
            whole = gather(llm.stream(prompts, greedy(5)))
            results[i, turn] = prompts, [whole[key][0][2] for key in sorted(whole)]

    in_threads(4, work)
    assert len(results) == 4 * 3
    for prompts, found in results.values():
        assert found == [reference(checkpoint, p, 5) for p in prompts]
    assert_usable(llm, checkpoint)


# -- listeners ------------------------------------------------------------------------------------


class Notes(list):
    """A listener that is not true while it is empty."""

    def __call__(self, output):
        self.append(output)


def test_listener_is_told_instead_of_step(llm, checkpoint):
    notes = [Notes() for _ in PROMPTS]
    for prompt, params, own in zip(PROMPTS, PARAMS, notes, strict=True):
        llm.add_request(prompt, params, listener=own)
    other = llm.add_request(PROMPT, greedy(3))
    assert run_steps(llm) == {other: reference(checkpoint, PROMPT, 3)}
    wholes = [gather(own).popitem()[1] for own in notes]
    assert [one[0][2] for one in wholes] == references(checkpoint)
    assert_usable(llm, checkpoint)


def test_listener_must_be_callable(llm, checkpoint):
    with pytest.raises(TypeError, match="`listener` must be callable, got list"):
        llm.add_request(PROMPT, listener=[])
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize("when", [1, 4])
def test_listener_may_abort(when, llm, checkpoint):
    """Its own request, also in the step in which that ends: the books were changed under it."""
    told = []

    def listener(output):
        told.append(output)
        if len(told) >= when:
            llm.abort(output.request_id)
            llm.abort(others[0])

    params = SamplingParams(n=2, seed=3, max_tokens=4)
    llm.add_request(PROMPT, params, listener=listener)
    others = [llm.add_request(PROMPT, greedy(9)), llm.add_request(PROMPT, greedy(9))]
    assert run_steps(llm) == {others[1]: reference(checkpoint, PROMPT, 9)}
    assert len(told) == when
    assert_usable(llm, checkpoint)


def test_aborted_by_another_listener(llm, checkpoint):
    """It ends without a word: nothing of it has finished."""
    told = []
    llm.add_request(PROMPT, greedy(4), listener=lambda output: llm.abort(victim))
    victim = llm.add_request(PROMPT, greedy(4), listener=told.append)
    assert run_steps(llm) == {}
    assert not told
    assert_idle(llm)
    assert_usable(llm, checkpoint)


def test_listener_may_add(llm, checkpoint):
    notes = []

    def listener(output):
        notes.append(output)
        if output.finished and len(prompts) > 1:
            llm.add_request(prompts.pop(), greedy(3), listener=listener)

    prompts = [PROMPT, PROMPT[::-1], [3, 4]]
    llm.add_request(prompts.pop(), greedy(3), listener=listener)
    run_steps(llm)
    assert len(gather(notes)) == 2
    assert_usable(llm, checkpoint)


def test_error_of_a_listener_drops_nothing(llm, checkpoint):
    def listener(output):
        raise KeyError("the listener's")

    llm.add_request(PROMPT, greedy(1), listener=listener)
    other = llm.add_request(PROMPT, greedy(9))
    with pytest.raises(KeyError, match="the listener's"):
        run_steps(llm)
    assert run_steps(llm) == {other: reference(checkpoint, PROMPT, 9)}
    assert_usable(llm, checkpoint)
