"""The device for `Config.device`, its abilities, and uploads of arrays to it."""

import contextlib
import functools
import importlib.util
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

# Held while a CUDA graph is captured. PyTorch captures one at a time, and no thread may wait for a
# whole device, or free its memory, while another captures on it.
capturing = threading.RLock()

FP8_CAPABILITY = (8, 9)  # least for GPUs that convert FP8
MIN_CAPABILITY = (8, 0)  # least for our kernels: 7.5 has too little shared memory for their tiles


def resolve_device(
    choice: str, rank: int = 0, size: int = 1, option: str = "tensor_parallel_size"
) -> torch.device:
    """The device of one of `size` ranks. ValueError if there is no such device; `option` names the
    option that asks for `size` devices.
    """
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(choice)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if size > 1 and device.index is not None:
            raise ValueError(
                f"`device` must have no index with {option} {size}, got {choice!r}: choose "
                "the GPUs by CUDA_VISIBLE_DEVICES"
            )
        if 0 < count < size:
            raise ValueError(
                f"`{option}` must be at most the number of CUDA devices, {count}, got {size}"
            )
        index = device.index if device.index is not None else rank
        if index >= count:
            raise ValueError(
                f"`device` {choice!r} does not exist: PyTorch sees {count} CUDA devices; "
                "use device='cpu' or 'auto', or install a PyTorch build for CUDA"
            )
        device = torch.device("cuda", index)
    return device


def device_shares(choice: str, count: int, size: int) -> list[dict[str, str]]:
    """Environment variables that give each of `count` processes `size` devices of its own.

    Raises:
        ValueError: if there are not enough devices.
    """
    option = "data_parallel_size" if size == 1 else "data_parallel_size * tensor_parallel_size"
    if resolve_device(choice, 0, count * size, option).type != "cuda":
        return [{} for _ in range(count)]
    variable = "CUDA_VISIBLE_DEVICES" if torch.version.hip is None else "HIP_VISIBLE_DEVICES"
    visible = os.environ.get(variable) or ",".join(map(str, range(count * size)))
    names = [name.strip() for name in visible.split(",")]
    if len(names) < count * size:
        raise ValueError(
            f"{variable} must name a device for each of {option} {count * size}, got {visible!r}"
        )
    return [{variable: ",".join(names[i * size : (i + 1) * size])} for i in range(count)]


def prepare_device(device: torch.device) -> threading.Thread:
    """Start a thread that has PyTorch make its context on a GPU and load cuBLAS, mostly without
    Python's lock. Returns the thread.
    """

    def prepare() -> None:
        with contextlib.suppress(Exception):  # the first user of the device meets the same error
            one = torch.zeros(1, 1, device=device)
            one @ one

    thread = threading.Thread(target=prepare, name="nanovllm-prepare-device", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """No gradients, and this device as the current one (kernels run on the current one)."""
    on_cuda = device.type == "cuda"
    with (
        torch.inference_mode(),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
    ):
        yield


def wait_for_device(device: torch.device) -> None:
    """Wait for all work on a CUDA device, and for other threads' captures of graphs."""
    with capturing:
        torch.cuda.synchronize(device)


@functools.cache
def capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for any device under ROCm."""
    return torch.cuda.get_device_capability(index) if torch.version.hip is None else (0, 0)


@functools.cache
def num_multiprocessors(index: int | None) -> int:
    """The number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def triton_refusal(device: torch.device) -> str | None:
    """The reason why our Triton kernels cannot run on `device`; None if they can. Every choice
    between them and PyTorch's functions asks here, so a GPU that cannot run some of them runs none.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        found = capability(device.index)
        if torch.version.hip is None and found < MIN_CAPABILITY:
            wanted, got = (".".join(map(str, version)) for version in (MIN_CAPABILITY, found))
            return f"needs a GPU of compute capability {wanted} or higher, got {got}"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, not {device.type} (TRITON_INTERPRET=1 runs it slowly)"
    return None


def fp8_refusal(device: torch.device) -> str | None:
    """The reason why a KV cache on `device` cannot be FP8; None if it can."""
    if device.type == "cuda" and capability(device.index) < FP8_CAPABILITY:
        wanted = ".".join(map(str, FP8_CAPABILITY))
        return f"needs an NVIDIA GPU of compute capability {wanted} or higher, or a CPU"
    return None


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether x is on a GPU that can run our kernels."""
    return x.is_cuda and triton_refusal(x.device) is None


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy int32 and float32 arrays to the device in one pinned copy, each aligned to 16 bytes."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    offsets = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays]).tolist()
    host = torch.empty(offsets[-1], dtype=torch.int32, pin_memory=True)
    view = host.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        view[offset : offset + array.size] = np.ascontiguousarray(array).view(np.int32).ravel()
    packed = host.to(device, non_blocking=True)
    return [
        packed[offset : offset + array.size]
        .view(torch.float32 if array.dtype == np.float32 else torch.int32)
        .view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, complete when the current stream is; a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def rows_to_host(tensor: torch.Tensor, rows: NDArray[np.intp]) -> torch.Tensor:
    """Rows of a tensor that is complete, in host memory: copied at once, beside later work of the
    device.
    """
    index = torch.from_numpy(rows)
    if not tensor.is_cuda:
        return tensor[index]
    copying = _side_stream(tensor.device)
    with torch.cuda.stream(copying):
        return tensor[index.to(tensor.device)].cpu()


def host_array(device: torch.device, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """An int32 array whose content is arbitrary, in memory that the device can read directly."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda").numpy()


def upload_beside(device: torch.device, array: NDArray[np.int32]) -> torch.Tensor:
    """Copy a whole `host_array` to the device at once, beside earlier work of the device; later
    work on the current stream finds it there. Pays if the array is large. The array must not be
    written to any more; PyTorch keeps its memory until it is copied.
    """
    if device.type == "cpu" or not array.size:
        return torch.from_numpy(array).to(device)
    computing, copying = torch.cuda.current_stream(device), _side_stream(device)
    with torch.cuda.stream(copying):
        copied = torch.from_numpy(array).to(device, non_blocking=True)
    computing.wait_stream(copying)
    copied.record_stream(computing)
    return copied


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def hardware_name(device: str) -> str:
    """The name of a GPU or CPU, as it reports it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # Linux; platform.processor() is empty there
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "CPU"
