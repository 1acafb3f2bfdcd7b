"""`Letter`: a message to workers of any size, in an anonymous file of its own. No torch here."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Letter(NamedTuple):
    """A message that another process of this machine reads.

    Attributes:
        pid, fd: process that has the file open, and its descriptor there.
    """

    pid: int
    fd: int

    def read(self) -> Any:
        """The object in it."""
        with open(f"/proc/{self.pid}/fd/{self.fd}", "rb") as file:
            return pickle.load(file)


@contextmanager
def letter(value: Any) -> Iterator[Letter]:
    """A letter that can be read until the end of the block."""
    fd = os.memfd_create("nanovllm-letter", os.MFD_CLOEXEC)
    with open(fd, "wb") as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        file.flush()
        yield Letter(os.getpid(), fd)
