"""`Hold`: the reasons for which an engine computes nothing. No torch here."""

from typing import Protocol, TypeAlias

from nanovllm.threads.interrupts import uninterrupted

Version: TypeAlias = int | str


class Holder(Protocol):
    """A core that can be held."""

    def prepare_to_hold(self) -> None:
        """Wait until `hold` takes no longer than a step."""

    def hold(self) -> None:
        """Compute nothing until `release`, and then all requests again from their beginning."""

    def release(self, version: Version) -> None:
        """Go on, with weights of this version."""


class Hold:
    """The reasons, each with a name. While there is one, the engine is held.

    Args:
        holder: core that computes requests.

    Attributes:
        version: version of the weights, for `release`.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._reasons: dict[str, str] = {}
        self.version: Version = 0

    def __getitem__(self, name: str) -> str | None:
        """The reason of this name; None if there is none."""
        return self._reasons.get(name)

    @property
    def refusal(self) -> str | None:
        """A reason why the engine cannot compute, for a caller; None if it can."""
        return next(iter(self._reasons.values()), None)

    def prepare(self) -> None:
        """Wait until `add` takes no longer than a step. Ctrl-C ends that, and changes nothing."""
        if not self._reasons:
            self._holder.prepare_to_hold()

    def add(self, name: str, reason: str) -> None:
        """Hold the engine for a reason, which replaces another of the same name."""
        with uninterrupted():
            if not self._reasons:
                self._holder.hold()
            self._reasons[name] = reason

    def drop(self, name: str) -> None:
        """Drop a reason; after the last the engine goes on."""
        with uninterrupted():
            if self._reasons.pop(name, None) is not None and not self._reasons:
                self._holder.release(self.version)
