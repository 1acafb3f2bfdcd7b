"""`AbsentGPU`: a Triton driver for a GPU that this process does not touch, or that does not exist.

After `triton.runtime.driver.set_active`, kernels are compiled for it. A launch does nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Target(NamedTuple):
    """The GPU for which kernels are compiled.

    Attributes:
        backend: Triton's backend, "cuda" or "hip".
        arch: 10 * major + minor of the compute capability, or AMD's name of the architecture.
        warp_size: threads per warp.
        shared_memory: maximum bytes of shared memory of a thread block.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


class AbsentGPU:
    """A Triton driver with which kernels can be compiled and, without effect, launched.

    Args:
        target: GPU to compile for.
        launcher: function that compiles the code that passes a kernel its arguments; None: this
            code is not compiled.
    """

    def __init__(self, target: Target, launcher: Callable[..., object] | None = None) -> None:
        self._target, self._launcher = target, launcher
        self.utils = self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self._target[:3])

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._target.shared_memory}

    def load_binary(self, *args: object) -> tuple[int, int, int, int, int]:
        module = function = 1
        num_registers = num_spills = 0
        return module, function, num_registers, num_spills, 1024

    def unload_module(self, module: int) -> None: ...

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        if self._launcher is not None:
            self._launcher(source, metadata)
        return lambda *args: None
