"""`Gloo`: collectives between processes on a CPU.

The process group is built directly, without `init_process_group`, which has one group for a whole
process: here each engine has its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

MEETING = timedelta(seconds=10)  # limit of a connection, which is tried five times
FOREVER = timedelta(days=365)  # a dead rank is noticed by its process, not by a time limit


class Gloo:
    """The ranks, connected through the store. The constructor returns when all have arrived.

    All methods raise RuntimeError if another rank is gone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = MEETING  # a rank that dies now would be waited for
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self.all_reduce(torch.zeros(1, dtype=torch.float32))
        self._group._set_default_timeout(FOREVER)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x by its sum over the ranks."""
        self._group.allreduce([x]).wait()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write the ranks' x, contiguous, into out: [size, ...]."""
        self._group.allgather([list(out)], [x]).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace x by rank 0's."""
        self._group.broadcast([x]).wait()

    def abort(self) -> None:
        """Do nothing: a rank that waits for a dead process is told by its socket."""
