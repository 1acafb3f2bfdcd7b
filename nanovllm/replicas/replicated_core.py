"""`ReplicatedCore`: requests that replicas compute, each in its own process. Imports no torch.

A `step` hands requests out and books the replicas' news. When a replica ends, its requests go to
other replicas, and it is restarted.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.core import Core
from nanovllm.outputs import RequestOutput
from nanovllm.ranks.processes import how_ended
from nanovllm.replicas.dispatcher import Dispatcher
from nanovllm.replicas.messages import Ended, News
from nanovllm.replicas.remote_request import MAX_LOSSES, Order, RemoteRequest
from nanovllm.replicas.supervisor import Replicas
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.tracing.metrics import Latencies, Metrics
from nanovllm.tracing.timeline import ENGINE, Process, Write

logger = logging.getLogger(__name__)

SUMS = (
    "num_kvcache_blocks",
    "num_used_kvcache_blocks",
    "num_waiting",
    "num_running",
    "num_preemptions",
    "num_graph_replays",
    "num_shared_prefix_steps",
    "num_kernels_compiling",
)
OF_SOME = (  # models: the same
    "num_images_encoded",
    "num_image_hits",
    "num_snapshots",
    "num_snapshot_hits",
    "num_snapshot_tokens",
)
STEP_SECONDS = 0.01  # a step's longest wait for news, so that callers can add requests in between


class ReplicatedCore(Core[RemoteRequest]):
    """A core whose requests replicas compute.

    Args:
        replicas: processes, which have started.
        config: options of the engine.
        max_model_len: maximum length of prompt and output together, in tokens.
        max_num_seqs: maximum number of sequences that each replica runs at once.
        pool_tokens: tokens that fit the KV pool of each replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: Config,
        max_model_len: int,
        max_num_seqs: int,
        pool_tokens: int,
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._dispatcher = Dispatcher(
            config.data_parallel_size,
            block_size=config.kvcache_block_size if config.enable_prefix_caching else 0,
            max_num_seqs=max_num_seqs,
            pool_tokens=pool_tokens,
            max_model_len=max_model_len,
        )
        self._counted: defaultdict[int, Metrics] = defaultdict(Metrics)  # already in `metrics`
        self._to_tell: deque[tuple[RemoteRequest, RequestOutput]] = deque()

    def add(self, request: RemoteRequest) -> None:
        """Queue a request."""
        with self.reset_on_error():
            self.requests[request.request_id] = request
            request.weight_version = self.weight_version
            self._dispatcher.add(request)

    def step(self) -> None:
        """Hand out the requests that replicas have room for, and book the replicas' news.

        Raises:
            WorkerError: if no replica is left.
        """
        self._drop_left()
        with uninterrupted(), self.reset_on_error():
            self._hand_out()
        self.meanwhile()
        self._book_all(STEP_SECONDS if self.requests else 0.0)
        self._tell()

    def _tell(self) -> None:
        """Tell listeners what has been booked. Comes last: they may call the engine."""
        while self._to_tell:
            request, output = self._to_tell.popleft()
            if output.finished:
                del self.requests[request.request_id]
            if request.listener is not None:
                request.listener(output)

    def prepare_to_hold(self) -> None:
        self._book_all(0.0)
        while self._replicas.are_starting:
            self._book_all(None)

    def hold(self) -> None:
        self._drop_left()
        self.prepare_to_hold()
        self._replicas.hold()
        self._book_all(0.0)
        self._tell()
        self.is_held = True

    def release(self, version: int | str) -> None:
        super().release(version)
        self._replicas.go_on(version)

    def _book_all(self, seconds: float | None) -> None:
        """Book the replicas' messages. Waits up to `seconds` (None: for ever) if there are none
        yet.
        """
        for _ in range(self._replicas.wait(seconds)):
            with uninterrupted(), self.reset_on_error():
                self._book(*self._replicas.pop())

    def _hand_out(self) -> None:
        orders: defaultdict[int, list[Order]] = defaultdict(list)
        for replica, request in self._dispatcher.hand_out(self._replicas.ready):
            orders[replica].append(request.order())
        for replica, some in orders.items():
            self._replicas.tell(replica, "take", some)

    def _book(self, replica: int, message: Any) -> None:
        if isinstance(message, Ended):
            self._lose(replica, message)
        elif isinstance(message, News):
            done = message.metrics.since(self._counted[replica])
            self.metrics.add(replace(done, num_aborted=0))  # counted here
            self._counted[replica] = message.metrics
            for news in message.outputs:
                request = self.requests.get(news.request_id)
                if request is not None:  # else it has been dropped
                    self._take(request, request.book(news))

    def _take(self, request: RemoteRequest, output: RequestOutput) -> None:
        if request.is_finished:
            self._dispatcher.drop(request)
        if request.listener is not None:
            self._to_tell.append((request, output))
        elif request.is_finished:
            del self.requests[request.request_id]
            self.finished.append(request)

    def _lose(self, replica: int, ended: Ended) -> None:
        self._counted.pop(replica, None)
        lost = self._dispatcher.take_back(replica)
        again = self._replicas.start_again(replica)
        how = f"replica {replica} {how_ended(ended.exit_code)}"
        trace = f". Its traceback:\n{ended.failure.traceback}" if ended.failure.traceback else ""
        logger.warning(
            "%s; its %d unfinished requests go to another replica, and it is %s%s",
            how,
            len(lost),
            _what_follows(again, self._replicas.are_held),
            trace,
        )
        if self._replicas.is_broken:
            raise self._replicas.error(replica, ended)
        for request in lost:
            if request.num_losses >= MAX_LOSSES:
                self._take(request, request.fail(f"{how} while computing this request{trace}"))

    def abort(self, request_ids: Iterable[int]) -> int:
        """Drop the unfinished ones of these requests. Returns their number."""
        with uninterrupted():
            return super().abort(request_ids)

    def _abort(self, requests: list[RemoteRequest]) -> None:
        dropped = set(requests)
        self._to_tell = deque(item for item in self._to_tell if item[0] not in dropped)
        ids: defaultdict[int, list[int]] = defaultdict(list)
        for request in requests:
            if request.is_finished:
                continue  # only its listener has not been told yet
            replica = self._dispatcher.replica_of(request)
            self._dispatcher.drop(request)
            if replica is not None:
                ids[replica].append(request.request_id)
        for replica, some in ids.items():
            self._replicas.tell(replica, "drop", some)

    def reset(self) -> None:
        """Drop every request, and all cached blocks of the replicas."""
        with uninterrupted():
            super().reset()
            self._to_tell.clear()
            self._dispatcher.reset()
            for replica in self._replicas.ready:
                self._replicas.tell(replica, "forget")

    def record(
        self, write: Write, facts: dict[str, Any], process: Process = ENGINE
    ) -> Callable[[], None]:
        """Have each replica record its steps, with facts and a process of its own."""
        self._replicas.record(write)
        return self._replicas.stop_recording

    def describe(self) -> dict[str, Any]:
        """Sums over all replicas, and in `replicas`, by number, the `metrics` of each that is ready
        and answers in time. Histograms and queues cover those only.
        """
        self._drop_left()
        self._book_all(0.0)
        found = self._replicas.ask("describe")
        described = [each.metrics for each in found.values()]
        latencies = Latencies()
        for each in found.values():
            latencies.add(each.latencies)
        sums = {name: sum(each[name] for each in described) for name in SUMS}
        of_some = [name for name in OF_SOME if described and name in described[0]]
        sums |= {name: sum(each[name] for each in described) for name in of_some}
        sums["num_waiting"] += self._dispatcher.num_waiting
        usage = sums["num_used_kvcache_blocks"] / max(sums["num_kvcache_blocks"], 1)
        return {
            **(described[0] if described else {}),
            **sums,
            "kvcache_usage": usage,
            **self.metrics.as_dict(),
            "prefix_cache_hit_rate": self.metrics.prefix_cache_hit_rate,
            **latencies.as_dict(),
            "num_replica_restarts": self._replicas.num_restarts,
            "replicas": {str(number): each.metrics for number, each in found.items()},
        }


def _what_follows(again: bool, held: bool) -> str:
    """The fate of a replica that has ended, in words."""
    if not again:
        return "not restarted: it has ended too often, or the weights have been updated"
    return "restarted when the engine goes on, unless its weights change" if held else "restarted"
