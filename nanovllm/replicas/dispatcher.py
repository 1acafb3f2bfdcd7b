"""`Dispatcher`: assigns requests to replicas. Imports no torch and knows no processes.

Requests that arrive together are ordered by their expected work, the largest first: then the last
ones to be handed out are small, and replicas end at about the same time. Prompts with a common
beginning stay together as one item of that order, so that one replica computes that beginning once,
unless they are more than a replica's part of the whole: then each replica computes it once. A
prompt of which a replica has seen at least half before (a conversation that goes on) is for that
replica.

A replica is handed requests while it has room: some more sequences than it runs at once, so that
its own scheduler never lacks any, and not many more, so that others can take the rest. The replica
with the least work chooses first: from the items that it has begun, then a new item, then a request
of an item that another replica has begun and has no room for, or would finish much later.

A request that was lost with two replicas may be the cause: from then on it is computed alone.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.replicas.remote_request import RemoteRequest
from nanovllm.scheduling.admission import LengthEstimator

# Cost of a generated token, in prompt tokens. On one H200, prompts are computed at 4 (8B shape) to
# 15 times (0.6B shape) the rate of the bench's decodes.
DECODE_COST = 8
AHEAD = 8  # a replica is handed 1 / AHEAD more than it runs at once
MAX_HOMES = 1 << 16  # remembered blocks of prompts


class _Entry:
    """A request, with its expected cost.

    Attributes:
        num_seqs, num_tokens: sequences and KV tokens that it occupies in a replica at its end.
        work: expected cost, in prompt tokens.
        blocks: hashes of the full blocks of its prompt.
        replica: number of the replica that has it; None while it waits.
    """

    def __init__(self, request: RemoteRequest, remaining: int, block_size: int) -> None:
        prompt, count = request.prompt_token_ids, request.num_seqs
        self.request = request
        self.num_seqs, self.num_tokens = count, count * (request.num_tokens + remaining)
        self.work = request.num_tokens + DECODE_COST * count * remaining
        self.blocks: list[int] = []
        self.replica: int | None = None
        for end in range(block_size, len(prompt), block_size) if block_size else ():
            before = self.blocks[-1] if self.blocks else NO_HASH
            self.blocks.append(BlockManager.compute_hash(prompt[end - block_size : end], before))


class _Load:
    """The unfinished requests of a replica, counted, and the items that it has begun."""

    def __init__(self) -> None:
        self.num_seqs = self.num_tokens = self.work = 0
        self.has_suspect = False
        self.begun: deque[_Entry] = deque()

    def count(self, entry: _Entry, sign: int) -> None:
        self.num_seqs += sign * entry.num_seqs
        self.num_tokens += sign * entry.num_tokens
        self.work += sign * entry.work
        self.has_suspect = sign > 0 and entry.request.is_suspect  # a suspect is alone


class Dispatcher:
    """The keeper of all requests: of those that wait, and of those that replicas have.

    Args:
        num_replicas: number of replicas.
        block_size: tokens of a KV block; 0: prefixes are not cached.
        max_num_seqs: maximum number of sequences that a replica runs at once.
        pool_tokens: tokens that fit a replica's KV pool.
        max_model_len: maximum length of prompt and output together, in tokens.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        block_size: int,
        max_num_seqs: int,
        pool_tokens: int,
        max_model_len: int,
    ) -> None:
        self._num_replicas, self._block_size = num_replicas, block_size
        self._max_seqs = max_num_seqs + -(-max_num_seqs // AHEAD)
        self._max_tokens = pool_tokens + pool_tokens // AHEAD
        self._lengths = LengthEstimator(max_model_len)
        self.reset()

    def reset(self) -> None:
        """Forget all requests, and the cached blocks of the replicas."""
        self._homes: OrderedDict[int, int] = OrderedDict()  # replicas by a block's hash
        self._entries: dict[int, _Entry] = {}  # entries by request id
        self._arrived: list[_Entry] = []
        self._items: deque[deque[_Entry]] = deque()
        self._loads = [_Load() for _ in range(self._num_replicas)]
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        return self._num_waiting

    def add(self, request: RemoteRequest) -> None:
        """Queue a request."""
        entry = _Entry(request, self._lengths.remaining(request), self._block_size)
        self._entries[request.request_id] = entry
        self._arrived.append(entry)
        self._num_waiting += 1

    def replica_of(self, request: RemoteRequest) -> int | None:
        """The replica that has a request; None while it waits."""
        return self._entries[request.request_id].replica

    def drop(self, request: RemoteRequest) -> None:
        """Forget a request that has ended, or is not wanted any more."""
        entry = self._entries.pop(request.request_id)
        if entry.replica is None:
            self._num_waiting -= 1
        else:
            self._loads[entry.replica].count(entry, -1)
        if request.is_finished:
            self._lengths.observe(request)

    def take_back(self, replica: int) -> list[RemoteRequest]:
        """Requeue the requests of a replica that has died, before all others, and return them."""
        back = [entry for entry in self._entries.values() if entry.replica == replica]
        for entry in back:
            entry.replica = None
            entry.request.lose()
        self._num_waiting += len(back)
        for entry in reversed([*back, *self._loads[replica].begun]):
            self._items.appendleft(deque([entry]))
        self._loads[replica] = _Load()
        for block in [block for block, home in self._homes.items() if home == replica]:
            del self._homes[block]
        return [entry.request for entry in back]

    def hand_out(self, replicas: Iterable[int]) -> list[tuple[int, RemoteRequest]]:
        """Give these replicas the requests that they have room for. Returns pairs of both."""
        self._sort_arrived()
        handed: list[tuple[int, RemoteRequest]] = []
        ready = list(replicas)
        while self._num_waiting:
            for replica in sorted(ready, key=lambda i: self._loads[i].work):
                if (entry := self._choose(replica, ready)) is not None:
                    self._hand(entry, replica)
                    handed.append((replica, entry.request))
                    break
            else:
                break
        return handed

    # -- the choice of requests -----------------------------------------------------------------

    def _sort_arrived(self) -> None:
        """Group the requests that have arrived since the last call into items."""
        arrived = [entry for entry in self._arrived if self._waits(entry)]
        self._arrived = []
        share = sum(entry.work for entry in arrived) / self._num_replicas
        work: defaultdict[int, int] = defaultdict(int)
        for entry in arrived:
            for block in entry.blocks:
                work[block] += entry.work
        items: defaultdict[object, deque[_Entry]] = defaultdict(deque)
        for entry in sorted(arrived, key=lambda entry: entry.work, reverse=True):
            # The shortest common beginning whose requests are not too much for one replica.
            shared = (block for block in entry.blocks if work[block] <= share)
            items[next(shared, entry)].append(entry)
        for item in sorted(items.values(), key=lambda item: -sum(entry.work for entry in item)):
            home = self._home(item[0])
            if home is None:
                self._items.append(item)
            else:
                self._loads[home].begun.extend(item)

    def _home(self, entry: _Entry) -> int | None:
        """The replica that has seen at least half of a prompt."""
        for i in range(len(entry.blocks) - 1, -1, -1):
            if 2 * (i + 1) * self._block_size < len(entry.request.prompt_token_ids):
                return None
            if (home := self._homes.get(entry.blocks[i])) is not None:
                return home
        return None

    def _choose(self, replica: int, ready: list[int]) -> _Entry | None:
        """Choose a request for a replica: of the items that it has begun, of a new item, or of one
        that another replica has begun. None if it has no room for the first, or there is none.
        """
        load = self._loads[replica]
        begun = self._first(load.begun)
        if begun is not None:
            return load.begun.popleft() if self._has_room(load, begun) else None
        new = self._first_of_items()
        if new is None:
            return self._choose_from_others(load, ready)
        if not self._has_room(load, new):
            return None
        load.begun = self._items.popleft()
        return load.begun.popleft()

    def _first_of_items(self) -> _Entry | None:
        """The first request of the first item that no replica has begun. Drops items of which none
        waits, on the way.
        """
        while self._items:
            if (entry := self._first(self._items[0])) is not None:
                return entry
            self._items.popleft()
        return None

    def _choose_from_others(self, load: _Load, ready: list[int]) -> _Entry | None:
        """Choose the last request of an item that another replica has begun, and has no room for or
        would finish much later. Those with the most work give first.
        """
        others = [self._loads[i] for i in ready if self._loads[i] is not load]
        for other in sorted(others, key=lambda other: other.work, reverse=True):
            last = self._first(other.begun, last=True)
            if last is None or not self._has_room(load, last):
                continue
            # It must pay to compute the beginning of the prompt here, too.
            later = other.work - load.work >= last.request.num_tokens
            if later or not self._has_room(other, last):
                return other.begun.pop()
        return None

    def _waits(self, entry: _Entry) -> bool:
        return entry.replica is None and entry.request.request_id in self._entries

    def _first(self, begun: deque[_Entry], *, last: bool = False) -> _Entry | None:
        """The first (or last) entry that still waits. Drops those that do not, on the way."""
        while begun and not self._waits(begun[-1 if last else 0]):
            if last:
                begun.pop()
            else:
                begun.popleft()
        return begun[-1 if last else 0] if begun else None

    def _has_room(self, load: _Load, entry: _Entry) -> bool:
        if entry.request.is_suspect or load.has_suspect:
            return not load.num_seqs
        return not load.num_seqs or (
            load.num_seqs + entry.num_seqs <= self._max_seqs
            and load.num_tokens + entry.num_tokens <= self._max_tokens
        )

    def _hand(self, entry: _Entry, replica: int) -> None:
        entry.replica = replica
        self._loads[replica].count(entry, +1)
        self._num_waiting -= 1
        for block in entry.blocks:
            self._homes[block] = replica
            self._homes.move_to_end(block)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
