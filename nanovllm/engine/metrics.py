"""Counters of an engine, and the progress bar that shows their rates."""

from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm
from typing_extensions import Self

from nanovllm.engine.scheduler import ScheduledSequence
from nanovllm.engine.sequence import Sequence


@dataclass
class Metrics:
    """What an engine has done since it was built.

    Attributes:
        num_steps: steps of the model.
        num_prefill_tokens: prompt tokens computed (and whatever a preempted sequence repeats).
        num_decode_tokens: tokens computed one at a time, each giving the next.
        prefill_seconds: time of the steps in which a sequence prefilled.
        decode_seconds: time of the steps that only decoded.
        num_finished: requests that ended.
        num_cached_tokens: prompt tokens of those that the prefix cache served.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_finished: int = 0
    num_cached_tokens: int = 0

    def count_step(self, scheduled: list[ScheduledSequence], seconds: float) -> None:
        """Count a step that took `seconds` more than those before it."""
        total = sum(item.num_tokens for item in scheduled)
        decode = sum(item.is_decode for item in scheduled)
        prefill = total - decode
        self.num_steps += 1
        self.num_prefill_tokens += prefill
        self.num_decode_tokens += decode
        if prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds

    def count_finished(self, finished: list[Sequence]) -> None:
        """Count sequences that ended."""
        self.num_finished += len(finished)
        self.num_cached_tokens += sum(seq.num_cached_tokens for seq in finished)

    def as_dict(self) -> dict[str, int | float]:
        """The counters by name."""
        return asdict(self)

    def since(self, earlier: "Metrics") -> "Metrics":
        """What has been counted since the copy `earlier`."""
        before = earlier.as_dict()
        return Metrics(**{k: v - before[k] for k, v in self.as_dict().items()})  # type: ignore[arg-type]


class Progress:
    """A bar over `total` requests, with the rates of `metrics` since it was opened."""

    def __init__(self, total: int, metrics: Metrics, enabled: bool) -> None:
        self._metrics = metrics
        self._start = replace(metrics)
        # `disable=False` would overrule TQDM_DISABLE.
        options: dict[str, Any] = {} if enabled else {"disable": True}
        self._bar = tqdm(total=total, desc="Generating", unit="req", **options)

    def update(self, num_finished: int) -> None:
        """Show the state after a step in which `num_finished` requests ended."""
        if self._bar.disable:
            return
        done = self._metrics.since(self._start)
        rates = {}
        if done.prefill_seconds:
            rates["prefill"] = f"{done.num_prefill_tokens / done.prefill_seconds:.0f} tok/s"
        if done.decode_seconds:
            rates["decode"] = f"{done.num_decode_tokens / done.decode_seconds:.0f} tok/s"
        self._bar.set_postfix(rates, refresh=False)
        self._bar.update(num_finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
