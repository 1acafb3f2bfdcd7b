"""News that wait for their caller: joined, whole, and no work for the garbage collector."""

import copy
import gc
import pickle
import random
import tracemalloc

import pytest

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.requests.news import AllNews, News


def told(seed: int, num_tokens: int, n: int, *, logprobs: bool) -> list[RequestOutput]:
    """News of a request, step by step: its completions begin and end at different steps, some
    of them by an error, without a token.
    """
    rng, outputs = random.Random(seed), []
    begin = [rng.randrange(3) for _ in range(n)]
    end = [num_tokens - rng.randrange(num_tokens // 2) for _ in range(n)]
    end[rng.randrange(n)] = num_tokens
    by_error = [rng.random() < 0.4 for _ in range(n)]
    lists = "logprobs", "sampling_mask"
    for step in range(num_tokens):
        parts = []
        for index in range(n):
            if begin[index] <= step < end[index]:
                token, value = rng.randrange(1000), -rng.random()
                part = {
                    "text": rng.choice(["", "a", "日本", "x y"]),
                    "token_ids": [token],
                    "finish_reason": "length" if step == end[index] - 1 else None,
                }
                if logprobs:
                    part["logprobs"] = [{token: Logprob(value, 1, None)}]
                    part["cumulative_logprob"] = value * step
                    part["sampling_mask"] = [rng.choice([None, [token, 1000]])]
                if by_error[index] and step == end[index] - 1:
                    part.update(text="", token_ids=[], finish_reason="error")
                    part.update(dict.fromkeys(lists, ()) if logprobs else {})
                parts.append(CompletionOutput(index, **part))
        if parts:
            outputs.append(RequestOutput(7, "p", [1, 2], parts, step == num_tokens - 1, step))
    return outputs


def plainly(outputs: list[RequestOutput]) -> dict[int, CompletionOutput]:
    """The completions of several outputs, put together in the plainest way."""
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for part in output.outputs:
            parts.setdefault(part.index, []).append(part)
    found = {}
    for index, own in sorted(parts.items()):
        last, logprobs = own[-1], [place for part in own for place in part.logprobs or ()]
        masks = [mask for part in own for mask in part.sampling_mask or ()]
        found[index] = CompletionOutput(
            index=index,
            text="".join(part.text for part in own),
            token_ids=[token for part in own for token in part.token_ids],
            finish_reason=last.finish_reason,
            logprobs=None if last.logprobs is None else logprobs,
            cumulative_logprob=last.cumulative_logprob,
            sampling_mask=None if last.sampling_mask is None else masks,
        )
    return found


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("n", [1, 3])
def test_what_has_queued_is_joined(n: int, logprobs: bool) -> None:
    """Taken at random moments: nothing is lost or told twice, and each output has the newest of
    what is not about tokens.
    """
    num_bare_ends = 0
    for seed in range(20):
        outputs = told(seed, 24, n, logprobs=logprobs)
        rng, news, all_news = random.Random(seed), News(), AllNews()
        queued: list[RequestOutput] = []
        taken, kept = [], []
        for i, output in enumerate(outputs):
            news.add(output)
            all_news.add(output)
            queued.append(output)
            if rng.random() < 0.4 or output is outputs[-1]:
                assert news.has_some and all_news.has_some
                one, whole = news.take(), all_news.take()
                assert one.outputs == [*plainly(queued).values()]
                for joined in (one, whole):
                    assert (joined.finished, joined.num_cached_tokens) == (
                        output.finished,
                        output.num_cached_tokens,
                    )
                    assert (joined.prompt, joined.request_id) == ("p", 7)
                assert not news.has_some and not all_news.has_some
                taken.append(one)
                kept.append((whole, i + 1))
                queued = []
        assert [*plainly(taken).values()] == [*plainly(outputs).values()]
        assert max(len(one.outputs[0].token_ids) for one in taken) > 1, "nothing had queued"
        num_bare_ends += sum(not part.token_ids for one in taken for part in one.outputs)
        for whole, count in kept:  # read when all is over: an output that is kept does not change
            assert whole.outputs == [*plainly(outputs[:count]).values()]
    assert num_bare_ends, "all ends came with a token"


def test_whole_outputs_are_values() -> None:
    """A list that a caller has is its own, and a copy holds no more than the output shows."""
    outputs, news = told(0, 9, 1, logprobs=True), AllNews()
    kept = []
    for output in outputs:
        news.add(output)
        kept.append(news.take().outputs[0])
    middle, wanted = kept[4], plainly(outputs[:5])[0]
    assert middle == wanted and wanted == middle and middle != kept[5]
    assert middle.to_dict() == wanted.to_dict()
    for twin in (pickle.loads(pickle.dumps(middle)), copy.deepcopy(middle)):
        assert type(twin) is CompletionOutput and twin == wanted
    for own in (middle, kept[-1]):
        own.token_ids.append(-1)
        own.logprobs.clear()  # type: ignore[union-attr]
        own.sampling_mask.clear()  # type: ignore[union-attr]
    assert kept[3] == plainly(outputs[:4])[0] and kept[5] == plainly(outputs[:6])[0]
    with pytest.raises(AttributeError, match="cannot assign"):
        kept[3].text = ""  # type: ignore[misc]


def size_of_whole_outputs(num_tokens: int) -> int:
    """Bytes of all whole outputs of a completion, kept and not read."""
    outputs = told(1, num_tokens, 1, logprobs=False)
    news, kept = AllNews(), []
    tracemalloc.start()
    for output in outputs:
        news.add(output)
        kept.append(news.take())
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


def test_whole_outputs_are_not_copied_at_every_token() -> None:
    """Eight times the tokens were 48 times the bytes when each output had all of them."""
    assert size_of_whole_outputs(4000) < 10 * size_of_whole_outputs(500)


@pytest.mark.parametrize("kind", [News, AllNews])
def test_news_that_wait_are_no_objects(kind: type[News]) -> None:
    """Python counts objects that exist at once: what waits for many callers must not start a
    garbage collection, which may look through the whole process.
    """
    outputs = told(2, 40, 1, logprobs=False)
    every = [kind() for _ in range(1000)]
    num_objects = []
    for output in outputs[:-1]:
        for news in every:
            news.add(RequestOutput(**{**vars(output), "outputs": [*output.outputs]}))
        num_objects.append(len(gc.get_objects()))
    assert num_objects[-1] - num_objects[1] < 100, "for 37,000 tokens"
    assert {len(news.take().outputs[0].token_ids) for news in every} == {len(outputs) - 1}
