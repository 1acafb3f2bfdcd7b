"""`check_threads`: PyTorch's threads on a CPU, in a process that is a fork of another.

Imports no torch: the package imports it as early as it can, to know in which process it is.
"""

import logging
import os
import signal
import time

logger = logging.getLogger(__name__)

PARALLEL = 1 << 20  # elements; operators divide more than 32,768 among threads
PATIENCE = 3.0  # seconds, for an operator that takes a millisecond
_known = {os.getpid()}  # processes whose threads answer; a fork inherits its parent's


def check_threads() -> None:
    """Have PyTorch compute with one thread if it would otherwise wait for a parent's threads.

    A fork has none of the threads that OpenMP started before it, and GNU's OpenMP, which comes with
    PyTorch, waits for them in the first operator. PyTorch's own `DataLoader` uses one thread in its
    workers. A fork that has already computed with threads of its own at the first check counts as
    one that cannot.
    """
    import torch

    if os.getpid() in _known:
        return
    num_threads = torch.get_num_threads()
    if num_threads > 1 and not _threads_answer():
        torch.set_num_threads(1)
        logger.warning(
            "this process is a fork without PyTorch's threads: it computes with one thread, not "
            'with %d; start the process by multiprocessing\'s "spawn"',
            num_threads,
        )
    _known.add(os.getpid())


def _threads_answer() -> bool:
    """Whether an operator ends. OpenMP has no function to tell: a fork of this process tries it."""
    import torch

    pid = os.fork()
    if not pid:
        try:
            torch.zeros(PARALLEL).add_(1)
        finally:
            os._exit(0)
    end = time.monotonic() + PATIENCE
    try:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
            time.sleep(1e-3)
    except ChildProcessError:  # it has ended, and the caller ignores exit statuses of children
        pass
    return True
