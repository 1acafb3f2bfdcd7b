"""Tensors for an engine in another process: `share_weights` there, `LLM.update_weights_ipc` here.

A message is a dictionary of numbers and strings, as JSON has them: nothing in it is ever executed.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from nanovllm.device_memory.driver import HANDLE_BYTES
from nanovllm.tensors.source import DTYPES
from nanovllm.updates.ledger import Described
from nanovllm.updates.parcel import (
    TORCH_DTYPES,
    Buffer,
    DeviceMemory,
    HostMemory,
    Named,
    Parcel,
    begins_of,
    room_of,
)
from nanovllm.updates.updating import Tensors, check_tensors, named_tensors
from nanovllm.utils.checks import shown

KEYS = ("names", "shapes", "dtypes", "offsets", "num_bytes", "memory")
T = TypeVar("T")


@contextmanager
def share_weights(tensors: Tensors) -> Iterator[dict[str, Any]]:
    """Share tensors with an engine in another process of this machine.

    They are copied into one buffer, which takes as much memory again, on the device of the first
    of them. With a large model share some of them after others, between the engine's
    `start_weight_update()` and `finish_weight_update()`.

    Args:
        tensors: as for `LLM.update_weights`; all of the same device.

    Yields:
        The message for `LLM.update_weights_ipc`, to be sent by whatever means. It is valid until
        the end of the block: wait there until the engine has answered.

    Raises:
        TypeError, ValueError: if these are no tensors, of several devices, or of a dtype or layout
            that files of safetensors cannot have.
        RuntimeError: if the memory cannot be shared.
    """
    check_tensors(tensors)
    named = list(named_tensors(tensors))
    for name, tensor in named:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"tensor {name} is {tensor.dtype}, but must be one of {', '.join(map(str, DTYPES))}"
            )
    devices = {tensor.device for _, tensor in named}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no tensors"
        raise ValueError(f"`tensors` must be of one device, got {found}")
    buffer = Buffer(sum(room_of(tensor.nbytes) for _, tensor in named), devices.pop())
    try:
        yield as_message(_pack(buffer, named))
    finally:
        buffer.close()


def _pack(buffer: Buffer, named: list[Named]) -> Parcel:
    with torch.no_grad():
        return buffer.pack(named)


def as_message(parcel: Parcel) -> dict[str, Any]:
    """A parcel as JSON has it."""
    memory: dict[str, Any] = parcel.memory._asdict()
    if isinstance(parcel.memory, DeviceMemory):
        memory = {"handle": parcel.memory.handle.hex()}
    return {
        "names": [each.name for each in parcel.tensors],
        "shapes": [each.shape for each in parcel.tensors],
        "dtypes": [each.dtype for each in parcel.tensors],
        "offsets": parcel.begins,
        "num_bytes": parcel.num_bytes,
        "memory": memory,
    }


def read_message(message: Any) -> Parcel:
    """The parcel of a message.

    Raises:
        TypeError, ValueError: if it is none of `share_weights`.
    """
    if not isinstance(message, Mapping) or set(message) != set(KEYS):
        hint = ": read it by json.loads()" if isinstance(message, (str, bytes)) else ""
        if isinstance(message, AbstractContextManager):
            hint = ": share by `with share_weights(tensors) as message`"
        raise TypeError(
            f"`message` must be what share_weights() has given in the other process{hint}"
        )
    try:
        return _read_parcel(message)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`message` must be what share_weights() has given in the other process, unchanged "
            f"({error})"
        ) from None


def _read_parcel(message: Mapping[str, Any]) -> Parcel:
    names, shapes, dtypes, begins = (_items(message[key]) for key in KEYS[:4])
    tensors = [
        Described(_exact(str, name), [_exact(int, n) for n in _items(shape)], _exact(str, dtype))
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    ]
    sizes = [_size(described) for described in tensors]
    begins = [_exact(int, n) for n in begins]
    if not tensors or begins != begins_of(sizes):
        raise ValueError(f"its tensors would not begin at {shown(begins)}")
    num_bytes = _exact(int, message["num_bytes"])
    if begins[-1] + sizes[-1] > num_bytes:
        raise ValueError(f"{tensors[-1].name} is not inside the buffer")
    return Parcel(tensors, begins, num_bytes, _read_memory(message["memory"]))


def _exact(kind: type[T], value: Any) -> T:
    """The value, which is of this very type: True is no number."""
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} is no {kind.__name__}")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{shown(value)} is no list")
    return list(value)


def _size(described: Described) -> int:
    """Bytes of a tensor."""
    name, shape, dtype = described
    if min(shape, default=0) < 0 or dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} is {dtype} of the shape {shown(shape)}")
    return math.prod(shape) * TORCH_DTYPES[dtype].itemsize


def _read_memory(memory: Any) -> HostMemory | DeviceMemory:
    if not isinstance(memory, Mapping) or set(memory) not in ({"handle"}, {*HostMemory._fields}):
        raise ValueError(f"its memory is {shown(memory)}")
    if "handle" in memory:
        handle = bytes.fromhex(_exact(str, memory["handle"]))
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}")
        return DeviceMemory(handle)
    return HostMemory(*(_exact(int, memory[field]) for field in HostMemory._fields))
