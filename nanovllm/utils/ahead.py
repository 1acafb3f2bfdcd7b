"""Compiling kernels ahead of their use, in threads: Triton compiles one when it is first called."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch


def _enter(stream: torch.cuda.Stream) -> None:
    """Work on a stream in this thread, which begins with the first device and its default stream,
    and without a CUDA context: descriptors, which need one, cannot be made in it.
    """
    torch.cuda.set_device(stream.device)
    torch.cuda.set_stream(stream)
    torch.zeros(1, device=stream.device)  # takes the context


class CompileAhead:
    """Threads that make calls. The end of a `with` block drops those that have not begun, and waits
    for the others; what they raise is raised by `wait` only.

    Args:
        device: that of the calls, on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        prepare = None
        if device.type == "cuda":
            prepare = partial(_enter, torch.cuda.current_stream(device))
        self._pool = ThreadPoolExecutor(initializer=prepare)
        self._made: list[Future[object]] = []

    def submit(self, calls: Iterable[Callable[[], object]]) -> None:
        """Have threads make these calls."""
        self._made += [self._pool.submit(call) for call in calls]

    def wait(self) -> None:
        """Until all calls are made.

        Raises:
            Exception: that of a call.
        """
        for call in self._made:
            call.result()
        self._made.clear()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
