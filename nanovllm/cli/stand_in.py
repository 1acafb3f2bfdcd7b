"""An engine on a stand-in for a GPU that is not there, in a process that does nothing else.

Tensors have shapes and no content (PyTorch's `meta` device) and claim to be on a GPU. Triton asks a
driver that answers for that GPU. So the engine itself chooses kernels and their variants, which can
be compiled; nothing runs.
"""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.compiling.absent_gpu import AbsentGPU, Target
from nanovllm.compiling.compiler import Compiler, num_processes
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.weights.quantized import dequantize
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.startup.builder import Builder
from nanovllm.utils.device import MIN_CAPABILITY
from nanovllm.utils.progress import startup_bar

GPU = torch.device("cuda", 0)
META, CPU = torch.device("meta"), torch.device("cpu")
IS_CUDA, DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "device"))
# As nothing runs.
WITHOUT = {"load_format": "dummy", "adapter": None, "data_parallel_size": 1, "trace": False}
LOWEST = 1 << 20  # address of storages, a multiple of 16 bytes as in PyTorch's allocator


class Card(NamedTuple):
    """A GPU: Triton's target, and the facts that PyTorch reports."""

    target: Target
    capability: tuple[int, int]

    @property
    def runs_kernels(self) -> bool:
        """Whether our kernels run on this GPU."""
        return self.target.backend != "cuda" or self.capability >= MIN_CAPABILITY

    @property
    def name(self) -> str:
        """The GPU's name in messages."""
        if self.target.backend != "cuda":
            return f"AMD's {self.target.arch}"
        return "compute capability {}.{}".format(*self.capability)


def _cuda(major: int, minor: int, kib: int) -> Card:
    return Card(Target("cuda", 10 * major + minor, 32, kib * 1024), (major, minor))


# CUDA C++ Programming Guide, technical specifications by compute capability; for gfx942 the local
# data share in the CDNA3 instruction set.
CARDS = {
    "7.5": _cuda(7, 5, 64),
    "8.0": _cuda(8, 0, 163),
    "8.6": _cuda(8, 6, 99),
    "8.9": _cuda(8, 9, 99),
    "9.0": _cuda(9, 0, 227),
    "10.0": _cuda(10, 0, 227),
    "12.0": _cuda(12, 0, 99),
    "gfx942": Card(Target("hip", "gfx942", 64, 64 * 1024), (9, 4)),
}


def card_here() -> Card:
    """The first GPU that this process sees."""
    from triton.runtime import driver

    target, capability = driver.active.get_current_target(), torch.cuda.get_device_capability()
    memory = driver.active.utils.get_device_properties(0)["max_shared_mem"]
    return Card(Target(target.backend, target.arch, target.warp_size, memory), capability)


class OnCard(TorchFunctionMode):
    """A mode that moves tensors meant for a GPU elsewhere, where they claim to be on a GPU.

    Args:
        place: `META`; or `CPU`, and then all tensors there claim it.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            x, is_there = args[0], args[0].device == self._place
            if is_there and func in (IS_CUDA, DEVICE):
                return func == IS_CUDA or GPU
            if x.is_meta and func == torch.Tensor.data_ptr:
                return LOWEST + x.storage_offset() * x.element_size()
            if func == torch.Tensor.copy_ and args[1].is_meta and not x.is_meta:
                return x.zero_()
        kwargs = {key: self._moved(value) for key, value in kwargs.items() if key != "pin_memory"}
        return func(*map(self._moved, args), **kwargs)

    def _moved(self, value: Any) -> Any:
        is_device = isinstance(value, (torch.device, str)) and str(value).startswith("cuda")
        return self._place if is_device else value


class Stream:
    """Stand-in for `torch.cuda.Stream`. Libraries make types of it: it must be a class."""

    cuda_stream = 0

    def __init__(self, *args: object, **options: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class Region:
    """Stand-in for `PeerRegion`."""

    def __init__(self, rank: int, device: torch.device, num_bytes: int, *args: object) -> None:
        self.num_bytes = num_bytes
        self.words = torch.empty(num_bytes // 8, dtype=torch.int64, device=device)
        self.addresses, self.abort_address = [LOWEST] * 8, LOWEST

    def call(self, *args: object) -> None: ...

    def close(self) -> None: ...


def put_in(card: Card) -> None:
    """Let this process see the card in the place of any GPU, without other ranks: from now on, for
    good.
    """
    from triton.runtime import driver

    from nanovllm.distributed import bulk, peer_memory
    from nanovllm.engine import executor
    from nanovllm.engine.executor import Executor
    from nanovllm.sampling import controlled_sampler
    from nanovllm.startup import builder

    driver.set_active(AbsentGPU(card.target))
    if card.target.backend == "hip":
        torch.version.hip = "6.3"
    cuda: Any = torch.cuda
    cuda.is_available = cuda.can_device_access_peer = lambda *args: True
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda device=None: card.capability
    major, minor = card.capability
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=132, major=major, minor=minor
    )
    cuda.mem_get_info = lambda device=None: (64 << 30, 64 << 30)
    cuda.max_memory_allocated = cuda.memory_allocated = lambda device=None: 0
    cuda.device = cuda.stream = lambda _: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream"):
        setattr(cuda, name, MagicMock())
    cuda.CUDAGraph = cuda.graph = MagicMock()
    scaled_mm = torch._scaled_mm  # knows no shapes on `meta` for an `out`
    torch._scaled_mm = lambda *args, out=None, **how: (
        scaled_mm(*args, **how) if out is None else out
    )
    cuda.Event = type("Event", (), {"record": lambda self: None, "synchronize": lambda self: None})
    cuda.Stream = Stream
    stand_ins: list[tuple[Any, str, Any]] = [
        (executor, "without_modes", contextlib.nullcontext),  # `OnCard` is one
        (builder, "load_dummy", lambda model, seed: None),
        (builder, "prepare_device", lambda device: MagicMock()),  # there is no device
        (builder, "num_processes", lambda num_ranks: num_processes(1)),  # one by one
        (
            *(controlled_sampler, "upload_beside"),
            lambda device, array: torch.from_numpy(array).to(device),
        ),
        (bulk, "PeerRegion", Region),
        (peer_memory, "PeerRegion", Region),
        (Group, "_share", lambda self, data: [data] * self.size),
        (Executor, "launch", meet_nobody),
    ]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)


def meet_nobody(self: Any) -> None:
    """Stand-in for `Executor.launch`: one rank of several, alone."""
    if self._group.size > 1:
        self._group._backend, self._group._device = MagicMock(), GPU


class RehearsedError(Exception):
    """Raised at the end of a `Rehearsing`, with its compiler, which is closed."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__("rehearsed")
        self.compiler = compiler


class Rehearsing(Builder):
    """A builder that compiles a rank's kernels and ends in a `RehearsedError`. Weights stay empty.

    Args:
        rank: number of the rank whose place this builder takes.
        config, model_config, group: arguments of `Builder`.
    """

    def __init__(self, rank: int, config: Config, model_config: ModelConfig, group: Group) -> None:
        group.rank = rank
        super().__init__(config, model_config, group)

    def start_compiler(self) -> Compiler:
        compiler = super().start_compiler()
        if compiler is None:
            raise ValueError("the compile server cannot be started")
        return compiler

    def choose(self) -> tuple[Build, str]:
        build, reason = super().choose()
        if build.backend.name == "torch":
            raise ValueError(
                "kernels cannot be compiled ahead with `attention_backend` torch, which reads "
                f"computed values: nothing is computed here ({reason})"
            )
        return build, reason

    def load(self, model: Qwen3ForCausalLM, dtype: torch.dtype) -> None:
        dequantize(model)

    def rehearse(self, *args: Any) -> None:
        assert self.compiler is not None
        super().rehearse(*args)
        with startup_bar(list(self.compiler.rehearsed), "Compiling kernels", "kernel") as bar:
            for job in bar:
                self.compiler.wait(job)
        raise RehearsedError(self.compiler)


def compile_kernels(model: str, card: Card, options: dict[str, Any]) -> list[Compiler]:
    """Compile the kernels of an engine into Triton's cache. Call `put_in` first.

    Args:
        model, options: arguments of `LLM`.
        card: GPU to compile for.

    Returns:
        Compilers of the ranks, closed, which list what they have compiled.
    """
    from nanovllm.engine import executor
    from nanovllm.engine.llm_engine import LLMEngine

    own: Any = executor
    compilers = []
    for rank in range(options.get("tensor_parallel_size") or 1):
        own.Builder = partial(Rehearsing, rank)
        with OnCard(META):
            try:
                LLMEngine(model, **{**options, **WITHOUT})
            except RehearsedError as end:
                compilers.append(end.compiler)
            else:
                raise AssertionError("an engine without a rehearsal")
    return compilers
