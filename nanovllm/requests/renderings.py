"""Conversations rendered by threads where their images come from hosts, so that many are fetched at
once. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 16  # they wait for hosts more than they compute


@contextmanager
def fetching_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that render. Work that has not begun at the end of the block is dropped; nobody waits
    for the rest, which `Fetcher` bounds.
    """
    pool = ThreadPoolExecutor(THREADS, "nanovllm-fetch")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def rendered_ahead(
    render: Callable[[T, str], Any], conversations: Mapping[str, T]
) -> Iterator[Callable[[T, str], Any]]:
    """A function like `render`, which threads call ahead, once for each conversation.

    Args:
        render: function of a conversation and its name.
        conversations: conversations, keyed by their names.
    """
    with fetching_threads() as pool:
        ahead = {name: pool.submit(render, given, name) for name, given in conversations.items()}

        def take(_: T, name: str) -> Any:
            return ahead.pop(name).result()

        yield take
