"""`Sleeping`: an engine that gives its memory back meanwhile. No torch here."""

from collections.abc import Callable, Sequence
from typing import Protocol

from nanovllm.updates.hold import Hold

TAGS = WEIGHTS, KV_CACHE = "weights", "kv_cache"
ASLEEP = {
    tag: f"the engine sleeps: call wake_up() first ({what})"
    for tag, what in (
        (WEIGHTS, "its weights have no memory"),
        (KV_CACHE, "its KV cache has no memory"),
    )
}


class Lender(Protocol):
    """Gives memory back and takes it again, see `updates.memory`."""

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: list[str]) -> None: ...


class Sleeping:
    """The sleep of an engine.

    Args:
        hold: reasons for which it computes nothing.
        memory: memory of all ranks.
        lose_weights: function that is called when the weights are dropped.
    """

    def __init__(self, hold: Hold, memory: Lender, lose_weights: Callable[[], None]) -> None:
        self._hold, self._memory, self._lose_weights = hold, memory, lose_weights

    @property
    def asleep(self) -> list[str]:
        """The tags of what has no memory."""
        return [tag for tag in TAGS if self._hold[tag] is not None]

    def sleep(self, level: int) -> None:
        """Give the memory back; see `LLM.sleep`."""
        self._hold.prepare()
        for tag, reason in ASLEEP.items():
            self._hold.add(tag, reason)
        if level == 2:
            self._lose_weights()
        self._memory.sleep(level)

    def wake(self, tags: Sequence[str] | None) -> None:
        """Take the memory again; see `LLM.wake_up`."""
        for tag in self.asleep:
            if tags is None or tag in tags:
                self._memory.wake([tag])
                self._hold.drop(tag)
