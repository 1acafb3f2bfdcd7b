"""`without_modes`: an engine computes the same whatever PyTorch modes its caller has on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import _C  # PyTorch has no public names for these functions


@contextmanager
def without_modes() -> Iterator[None]:
    """Turn the caller's modes off inside the block, and on again after it.

    These are the modes of the thread: a default device, autocast, transforms of `torch.func`,
    `TorchFunctionMode`s and `TorchDispatchMode`s (a `FakeTensorMode`, say). In the block
    `torch.device` is a mode again.

    The default dtype belongs to the process, and changing it would change what other threads
    compute: a tensor whose dtype matters is made with one. Other settings of the process hold here,
    too: the precision of products, deterministic algorithms, the number of threads.
    """
    modes: list[Any] = []
    try:
        while _C._len_torch_function_stack():
            modes.append(_C._pop_torch_function_stack())
        with _C._DisableTorchDispatch(), _C._DisableAutocast(), _C._DisableFuncTorch():
            yield
    finally:
        while modes:
            _C._push_on_torch_function_stack(modes.pop())
