"""`Meeting`: connects rank 0 with the workers, so that the ranks can sum."""

import threading

import torch

from nanovllm.distributed.group import Group
from nanovllm.distributed.store import Store, arrival
from nanovllm.ranks.processes import EXIT_TIMEOUT
from nanovllm.ranks.workers import Workers

POLL_SECONDS = 0.005


class Meeting:
    """A meeting of all ranks, in a thread: connecting cannot be interrupted if a worker dies.

    Args:
        group: rank 0's `Group`.
        device: torch.device of rank 0.
        workers: processes of the other ranks.
    """

    def __init__(self, group: Group, device: torch.device, workers: Workers) -> None:
        self._group, self._device, self._workers = group, device, workers
        self._store = Store(workers.ask)
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._error: BaseException | None = None

    def hold(self) -> None:
        """Wait for all ranks, and connect them.

        Raises:
            WorkerError: if a worker dies, even while this process waits for it.
        """
        self._store.wait([arrival(rank) for rank in range(1, self._group.size)])
        self._group.arrive(self._store, self._device)
        self._thread.start()
        while self._thread.is_alive():
            self._workers.check()
            self._thread.join(POLL_SECONDS)
        if self._error is not None:
            raise self._error

    def _meet(self) -> None:
        try:
            # If a worker dies just before it connects, NCCL is stopped by `abort`, Gloo by its time
            # limit.
            self._group.connect(self._store, self._device)
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Wait for the thread, and drop its error, which would keep its frames alive."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(EXIT_TIMEOUT)
        self._error = None
