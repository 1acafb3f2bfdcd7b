"""Tensors for an engine in another process: `share_weights` there, `LLM.update_weights_ipc` here.

A message is a dictionary of numbers and strings, as JSON has them: nothing in it is ever executed.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.device_memory.driver import HANDLE_BYTES
from nanovllm.updates.ledger import Described
from nanovllm.updates.parcel import (
    TORCH_DTYPES,
    Buffer,
    DeviceMemory,
    HostMemory,
    Named,
    Parcel,
    room_of,
)
from nanovllm.updates.updating import Tensors, check_tensors, named_tensors

KEYS = ("names", "shapes", "dtypes", "offsets", "num_bytes", "memory")


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
        TypeError, ValueError: if these are no tensors, or of several devices.
        RuntimeError: if the memory cannot be shared.
    """
    check_tensors(tensors)
    named = list(named_tensors(tensors))
    devices = {tensor.device for _, tensor in named}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no tensors"
        raise ValueError(f"`tensors` must be of one device, got {found}")
    buffer = Buffer(sum(room_of(tensor) for _, tensor in named), devices.pop())
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
    if not isinstance(message, Mapping) or sorted(message) != sorted(KEYS):
        raise TypeError("`message` must be what share_weights() has given in the other process")
    names, shapes, dtypes, begins, num_bytes, memory = (message[key] for key in KEYS)
    try:
        tensors = [
            Described(str(name), [int(n) for n in shape], str(dtype))
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
        ]
        parcel = Parcel(tensors, [int(n) for n in begins], int(num_bytes), _read_memory(memory))
        for described, begin in zip(parcel.tensors, parcel.begins, strict=True):
            size = math.prod(described.shape) * TORCH_DTYPES[described.dtype].itemsize
            if min([begin, *described.shape]) < 0 or begin + size > parcel.num_bytes:
                raise ValueError(f"{described.name} is not inside the buffer")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "`message` must be what share_weights() has given in the other process, unchanged "
            f"({error})"
        ) from None
    return parcel


def _read_memory(memory: Mapping[str, Any]) -> HostMemory | DeviceMemory:
    if "handle" in memory:
        handle = bytes.fromhex(memory["handle"])
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}")
        return DeviceMemory(handle)
    return HostMemory(*(int(memory[field]) for field in HostMemory._fields))
