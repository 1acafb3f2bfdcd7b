"""The store through which ranks meet."""

import socket
from datetime import timedelta

from torch import distributed as dist

FOREVER = timedelta(days=365)  # a rank that has died is noticed by its process, not by a time limit


def listen() -> tuple[dist.Store, int]:
    """The store through which ranks meet, on this machine only, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))  # a port that nobody uses
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=FOREVER,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def join(port: int) -> dist.Store:
    """The same store in another process."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=FOREVER)


def arrival(rank: int) -> str:
    """The key that a rank sets in the store when it is ready to meet the others."""
    return f"rank {rank} is there"
