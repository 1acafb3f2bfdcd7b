"""Conversations rendered by threads where their images come from hosts, so that many are fetched at
once. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from nanovllm.threads.daemons import Daemons

T = TypeVar("T")

THREADS = 16  # they wait for hosts more than they compute


def fetching_threads() -> Daemons:
    """Threads that render; `Fetcher` bounds their calls."""
    return Daemons("nanovllm-fetch", THREADS)


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
        ahead = {
            name: pool.submit(partial(render, given, name)) for name, given in conversations.items()
        }

        def take(_: T, name: str) -> Any:
            return ahead.pop(name).result()

        yield take
