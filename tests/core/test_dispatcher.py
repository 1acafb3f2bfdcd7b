"""Assignment of requests to replicas, without any replica."""

import random
from collections import Counter

import pytest

from nanovllm import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.replicas.dispatcher import Dispatcher
from nanovllm.replicas.remote_request import RemoteRequest
from nanovllm.requests.request import CheckedRequest, Ticket, Told

BLOCK = 4


def make(num_replicas=2, *, max_num_seqs=64, pool_tokens=10_000, block_size=BLOCK):
    return Dispatcher(
        num_replicas,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        pool_tokens=pool_tokens,
        max_model_len=1000,
    )


class Requests:
    """Makes requests with numbers of their own."""

    def __init__(self):
        self.made = []

    def __call__(self, prompt, max_tokens=10, n=1, ignore_eos=True):
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos)
        ticket = Ticket(len(self.made), 0, 0.0, {i: Told() for i in range(n)})
        request = RemoteRequest(CheckedRequest(None, prompt, params, None, [None] * n), ticket)
        self.made.append(request)
        return request


@pytest.fixture(name="request_")
def request_fixture():
    return Requests()


def unlike(count, length=6):
    """Prompts without a common beginning."""
    return [[1000 + i] * length for i in range(count)]


def add(dispatcher, requests):
    for request in requests:
        dispatcher.add(request)
    return requests


def by_replica(handed):
    found = {}
    for replica, request in handed:
        found.setdefault(replica, []).append(request)
    return found


def end(dispatcher, request, num_tokens):
    """The request ends with so many tokens."""
    completions = [CompletionOutput(i, "", [1] * num_tokens, "stop") for i in range(1)]
    request.book(RequestOutput(request.request_id, None, [], completions, True, 0))
    dispatcher.drop(request)


def test_work_is_divided_evenly_the_most_first(request_):
    rng = random.Random(0)
    dispatcher = make(3, max_num_seqs=500, pool_tokens=100_000)
    lengths = [rng.randint(10, 500) for _ in range(300)]
    add(dispatcher, [request_(p, n) for p, n in zip(unlike(300), lengths, strict=True)])
    handed = dispatcher.hand_out([0, 1, 2])
    assert [r.max_tokens for _, r in handed] == sorted(lengths, reverse=True)
    totals = [sum(r.max_tokens for r in some) for some in by_replica(handed).values()]
    # The largest first, each to the least: no two differ by more than one of the last.
    assert len(totals) == 3
    assert max(totals) - min(totals) <= 20
    assert not dispatcher.num_waiting


def test_room_is_an_eighth_more_than_runs_and_comes_back(request_):
    dispatcher = make(max_num_seqs=8)
    add(dispatcher, [request_(prompt) for prompt in unlike(50)])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    assert {replica: len(some) for replica, some in handed.items()} == {0: 9, 1: 9}
    assert dispatcher.num_waiting == 32
    for request in handed[1][:4]:
        end(dispatcher, request, 10)
    assert [replica for replica, _ in dispatcher.hand_out([0, 1])] == [1] * 4


def test_the_pool_bounds_the_room_too_and_a_large_request_fits_alone(request_):
    dispatcher = make(pool_tokens=160)
    add(dispatcher, [request_(prompt, 34) for prompt in unlike(20)])  # 40 tokens each
    assert Counter(r for r, _ in dispatcher.hand_out([0, 1])) == {0: 4, 1: 4}
    alone = make(pool_tokens=160, max_num_seqs=4)
    add(alone, [request_([1] * 10, 500, n=9)])
    assert len(alone.hand_out([0])) == 1


def test_common_beginnings_stay_together(request_):
    """Ten documents with eight questions each: each document is computed by one replica."""
    dispatcher = make(2, max_num_seqs=64)
    prompts = [[doc] * 12 + [question] for question in range(8) for doc in range(10)]
    add(dispatcher, [request_(prompt) for prompt in prompts])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    documents = {r: {q.prompt_token_ids[0] for q in some} for r, some in handed.items()}
    assert not documents[0] & documents[1]
    assert len(handed[0]) == len(handed[1]) == 40


def test_a_beginning_that_all_share_is_computed_by_each(request_):
    dispatcher = make(2, max_num_seqs=200)
    add(dispatcher, [request_([7] * 100 + [i]) for i in range(100)])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    assert len(handed[0]) == len(handed[1]) == 50


def test_common_beginnings_below_a_common_one(request_):
    """All share a system prompt, and within it documents: these count."""
    dispatcher = make(2, max_num_seqs=200)
    prompts = [[7] * 8 + [100 + doc] * 8 + [q] for q in range(5) for doc in range(8)]
    add(dispatcher, [request_(prompt) for prompt in prompts])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    documents = {r: {q.prompt_token_ids[8] for q in some} for r, some in handed.items()}
    assert not documents[0] & documents[1]
    assert len(documents[0]) == len(documents[1]) == 4


def test_no_replica_idles_while_another_one_has_a_backlog(request_):
    """Three equal groups, two replicas: the third is divided."""
    dispatcher = make(2, max_num_seqs=200)
    add(dispatcher, [request_([doc] * 8 + [q]) for doc in range(3) for q in range(20)])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    assert abs(len(handed[0]) - len(handed[1])) <= 1


def test_a_conversation_goes_on_where_it_began(request_):
    dispatcher = make(4)
    first = add(dispatcher, [request_(prompt, 50) for prompt in unlike(4, 20)])
    homes = {r.prompt_token_ids[0]: replica for replica, r in dispatcher.hand_out(range(4))}
    assert sorted(homes.values()) == [0, 1, 2, 3]
    for request in first:
        end(dispatcher, request, 5)
    for request in reversed(first):
        ((replica, _),) = _handed(dispatcher, request_([*request.prompt_token_ids, 1, 2]))
        assert replica == homes[request.prompt_token_ids[0]]


def _handed(dispatcher, request):
    dispatcher.add(request)
    return dispatcher.hand_out(range(4))


def test_without_prefix_caching_nothing_stays_together(request_):
    dispatcher = make(2, block_size=0)
    add(dispatcher, [request_([doc] * 12 + [q]) for doc in range(2) for q in range(2)])
    handed = by_replica(dispatcher.hand_out([0, 1]))
    assert {len({q.prompt_token_ids[0] for q in some}) for some in handed.values()} == {2}


def test_requests_of_a_lost_replica_go_first_and_to_others(request_):
    dispatcher = make(2, max_num_seqs=8)
    add(dispatcher, [request_(prompt) for prompt in unlike(40)])
    lost = by_replica(dispatcher.hand_out([0, 1]))[0]
    assert dispatcher.take_back(0) == lost
    assert len(lost) == 9
    assert not dispatcher.hand_out([1])  # full
    for request in request_.made:
        if dispatcher.replica_of(request) == 1:
            end(dispatcher, request, 10)
    assert [r for _, r in dispatcher.hand_out([1])] == lost


def test_a_request_lost_twice_is_computed_alone(request_):
    """It may be what replicas die of."""
    dispatcher = make(1)
    add(dispatcher, [request_(prompt) for prompt in unlike(3)])
    for _ in range(2):
        assert len(dispatcher.hand_out([0])) == 3
        dispatcher.take_back(0)
    new = add(dispatcher, [request_([7, 7])])
    for request in request_.made[:3]:
        assert [r for _, r in dispatcher.hand_out([0])] == [request]
        assert request.is_suspect
        end(dispatcher, request, 10)
    assert [r for _, r in dispatcher.hand_out([0])] == new


def test_a_lost_replica_is_no_home_any_more(request_):
    """Requests for it would wait until it comes back."""
    dispatcher = make(2)
    first = add(dispatcher, [request_([5] * 20)])
    ((home, _),) = dispatcher.hand_out([0, 1])
    dispatcher.take_back(home)
    other = 1 - home
    dispatcher.hand_out([other])
    end(dispatcher, first[0], 5)
    dispatcher.add(request_([5] * 21))
    assert [replica for replica, _ in dispatcher.hand_out([other])] == [other]
    dispatcher.reset()
    assert not dispatcher.num_waiting
    again = add(dispatcher, [request_([5] * 22)])
    assert dispatcher.hand_out([0, 1]) == [(0, again[0])], "what was cached is forgotten, too"


def test_expected_work_follows_the_lengths_of_late(request_):
    """Without ignore_eos requests are expected to end as others have, not at max_tokens."""
    dispatcher = make(2, max_num_seqs=500, pool_tokens=10_000)
    free = [request_(prompt, 900, ignore_eos=False) for prompt in unlike(40)]
    add(dispatcher, free[:20])
    assert len(dispatcher.hand_out([0, 1])) == 20, "12 of 906 tokens each fill a pool"
    for request in free[:20]:
        end(dispatcher, request, 10)
    add(dispatcher, free[20:])
    handed = by_replica(dispatcher.hand_out([0]))
    assert len(handed[0]) == 20


def test_aborted_ones_leave_wherever_they_are(request_):
    dispatcher = make(2, max_num_seqs=8)
    requests = add(dispatcher, [request_([doc] * 12 + [q]) for doc in range(4) for q in range(10)])
    handed = [request for _, request in dispatcher.hand_out([0, 1])]
    late = add(dispatcher, [request_([9])])
    for request in [*requests, *late]:
        dispatcher.drop(request)
    assert not dispatcher.num_waiting
    assert not dispatcher.hand_out([0, 1])
    again = add(dispatcher, [request_(prompt) for prompt in unlike(18)])
    assert len(dispatcher.hand_out([0, 1])) == len(again) == len(handed)


def test_random_workload_loses_and_doubles_nothing(request_):
    """Arrivals, ends, aborts, losses in any order; each request is with one replica at most, and
    all are handed out in the end.
    """
    rng = random.Random(1)
    dispatcher = make(3, max_num_seqs=8, pool_tokens=400)
    waiting, running = set(), {0: set(), 1: set(), 2: set()}
    for _ in range(2000):
        action = rng.random()
        if action < 0.4:
            prompt = [rng.randrange(3)] * rng.choice([5, 9, 30]) + [rng.randrange(3)]
            request = request_(prompt, rng.randint(1, 60), n=1)
            dispatcher.add(request)
            waiting.add(request)
        elif action < 0.7 and any(running.values()):
            replica = rng.choice([i for i in running if running[i]])
            request = running[replica].pop()
            if rng.random() < 0.5:
                end(dispatcher, request, rng.randint(1, 60))
            else:
                dispatcher.drop(request)
        elif action < 0.72:
            replica = rng.randrange(3)
            assert set(dispatcher.take_back(replica)) == running[replica]
            waiting |= running[replica]
            running[replica] = set()
        ready = rng.sample(range(3), rng.randint(0, 3))
        for replica, request in dispatcher.hand_out(ready):
            assert replica in ready
            waiting.remove(request)
            running[replica].add(request)
        assert dispatcher.num_waiting == len(waiting)
        for replica, some in running.items():
            assert all(dispatcher.replica_of(request) == replica for request in some)
            assert len(some) <= 9
            assert len(some) <= 1 or not any(request.is_suspect for request in some)
    while waiting:
        for some in running.values():
            while some:
                end(dispatcher, some.pop(), 1)
        handed = dispatcher.hand_out([0, 1, 2])
        assert handed, "requests are stuck"
        for replica, request in handed:
            waiting.remove(request)
            running[replica].add(request)
