"""`ReplicatedCore`: requests that replicas compute, each in a process of its own. No torch here.

A `step` hands requests out and books the news of the replicas. When a replica ends, its requests go
to others, and it is started again.
"""

import logging
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.core import Core
from nanovllm.engine.dispatcher import Dispatcher
from nanovllm.engine.intake import CheckedRequest, Intake
from nanovllm.engine.metrics import Latencies, Metrics
from nanovllm.engine.processes import how_ended
from nanovllm.engine.remote_request import Order, RemoteRequest
from nanovllm.engine.replicas import Ended, News, Replicas
from nanovllm.engine.request import Listener
from nanovllm.outputs import RequestOutput
from nanovllm.utils.interrupts import uninterrupted

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.01  # that a step waits for news, so that callers can add requests meanwhile


class ReplicatedCore(Core[RemoteRequest]):
    """Has requests computed by replicas.

    Args:
        replicas: started.
        config: of the engine.
        max_model_len: the most tokens of prompt and output.
        pool_tokens: tokens that the KV pool of each replica holds.
    """

    def __init__(
        self, replicas: Replicas, config: Config, max_model_len: int, pool_tokens: int
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._dispatcher = Dispatcher(
            config.data_parallel_size,
            block_size=config.kvcache_block_size if config.enable_prefix_caching else 0,
            max_num_seqs=config.max_num_seqs,
            pool_tokens=pool_tokens,
            max_model_len=max_model_len,
        )
        self._counted: defaultdict[int, Metrics] = defaultdict(Metrics)  # of each, in `metrics`
        self._to_tell: deque[tuple[RemoteRequest, RequestOutput]] = deque()

    def request(
        self,
        intake: Intake,
        checked: CheckedRequest,
        pooling: str | None,
        listener: Listener | None,
    ) -> RemoteRequest:
        """Make a request, whose sequences will be a replica's."""
        return RemoteRequest(checked, intake.ticket(checked.params.n), pooling, listener)

    def add(self, request: RemoteRequest) -> None:
        """Queue a request."""
        with self.reset_on_error():
            self.requests[request.request_id] = request
            self._dispatcher.add(request)

    def step(self) -> None:
        """Hand out what replicas have room for, and book what they have said meanwhile.

        Raises:
            WorkerError: if no replica is left.
        """
        self._drop_left()
        with uninterrupted(), self.reset_on_error():
            self._hand_out()
        for _ in range(self._replicas.wait(STEP_SECONDS if self.requests else 0.0)):
            with uninterrupted(), self.reset_on_error():
                self._book(*self._replicas.pop())
        while self._to_tell:  # last: a listener may call the engine
            request, output = self._to_tell.popleft()
            if request.listener is not None:
                request.listener(output)

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
                if request is not None:  # or it has been dropped
                    self._take(request, news)

    def _take(self, request: RemoteRequest, news: RequestOutput) -> None:
        output = request.book(news)
        if request.is_finished:
            del self.requests[request.request_id]
            self._dispatcher.drop(request)
        if request.listener is not None:
            self._to_tell.append((request, output))
        elif request.is_finished:
            self.finished.append(request)

    def _lose(self, replica: int, ended: Ended) -> None:
        self._counted.pop(replica, None)
        count = self._dispatcher.take_back(replica)
        again = self._replicas.start_again(replica)
        logger.warning(
            "replica %d %s; %d requests that it had not finished go to others, and it is %s%s",
            replica,
            how_ended(ended.exit_code),
            count,
            "started again" if again else "not started again: it has ended too often",
            f". Its traceback:\n{ended.failure.traceback}" if ended.failure.traceback else "",
        )
        if self._replicas.is_broken:
            raise self._replicas.error(replica, ended)

    def _abort(self, requests: list[RemoteRequest]) -> None:
        ids: defaultdict[int, list[int]] = defaultdict(list)
        for request in requests:
            replica = self._dispatcher.replica_of(request)
            self._dispatcher.drop(request)
            if replica is not None:
                ids[replica].append(request.request_id)
        for replica, some in ids.items():
            self._replicas.tell(replica, "drop", some)

    def reset(self) -> None:
        """Drop every request, and all that the replicas have cached."""
        super().reset()
        self._to_tell.clear()
        self._dispatcher.reset()
        for replica in self._replicas.ready:
            self._replicas.tell(replica, "forget")

    def describe(self) -> dict[str, Any]:
        """Sums over all replicas, and `metrics` of each in `replicas`, by their numbers."""
        self._drop_left()
        found = self._replicas.ask()
        queues: defaultdict[str, int | float] = defaultdict(int)
        latencies = Latencies()
        for each in found.values():
            latencies.add(each.latencies)
            for name, value in each.scheduler.items():
                queues[name] += value
        queues["num_waiting"] += self._dispatcher.num_waiting
        if found:
            queues["kvcache_usage"] /= len(found)
        return {
            **queues,
            **self.metrics.as_dict(),
            "prefix_cache_hit_rate": self.metrics.prefix_cache_hit_rate,
            **latencies.as_dict(),
            "data_parallel_size": self._dispatcher.num_replicas,
            "num_replica_restarts": self._replicas.num_restarts,
            "replicas": {str(number): each.metrics for number, each in found.items()},
        }
