"""Compiling kernels ahead of their use, in threads: Triton compiles one when it is first called."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch


def _enter(stream: torch.cuda.Stream) -> None:
    """Work on a stream in this thread, which begins with the first device and its default stream,
    and without a CUDA context: descriptors, which need one, cannot be made in it.
    """
    torch.cuda.set_device(stream.device)
    torch.cuda.set_stream(stream)
    torch.zeros(1, device=stream.device)  # takes the context


@contextmanager
def compiling(calls: Iterable[Callable[[], object]], device: torch.device) -> Iterator[None]:
    """Within it, threads make the calls; it ends when all are made.

    Raises:
        Exception: that of a call, at the end.
    """
    prepare = None
    if device.type == "cuda":
        prepare = partial(_enter, torch.cuda.current_stream(device))
    with ThreadPoolExecutor(initializer=prepare) as pool:
        made = [pool.submit(call) for call in calls]
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for call in made:
            call.result()
