"""Counters of an engine, its histograms of times, and the progress bar that shows rates."""

import time
from dataclasses import asdict, dataclass, replace

from typing_extensions import Self

from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.outputs import RequestMetrics
from nanovllm.requests.request import Request
from nanovllm.tracing.histogram import Histogram
from nanovllm.utils.progress import SHOWN, SILENT, tqdm


@dataclass
class Metrics:
    """Counters of an engine's work since it was built.

    A request counts once, when it ends, however often it was preempted. The work of an aborted one
    counts only in the steps and their tokens.

    `num_prefill_tokens / prefill_seconds` and `num_decode_tokens / decode_seconds` are the
    throughputs of steps with prefills or decodes, `num_sampled_tokens / step_seconds` is the
    engine's. A step with both counts with all its time for both, so `prefill_seconds` and
    `decode_seconds` may add up to more than `step_seconds`.

    Attributes:
        num_steps: steps of the model.
        num_prefill_tokens: prompt tokens computed (and tokens recomputed after preemptions).
        num_decode_tokens: tokens computed one at a time, each giving the next.
        num_sampled_tokens: generated tokens, including the first one, which a prefill gives.
        prefill_seconds: time of the steps in which a sequence prefilled.
        decode_seconds: time of the steps in which a sequence decoded.
        step_seconds: time of all steps.
        num_finished: requests that ended.
        num_aborted: requests that were dropped, by `abort` or after an error.
        num_finished_by_stop: completions of finished requests with the reason "stop".
        num_finished_by_length: completions of finished requests with the reason "length".
        num_finished_by_error: completions of finished requests with the reason "error".
        num_generated_tokens: tokens of these completions.
        num_prompt_tokens: prompt tokens of finished requests, counted for each completion.
        num_cached_tokens: prompt tokens from the prefix cache.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    num_finished: int = 0
    num_aborted: int = 0
    num_finished_by_stop: int = 0
    num_finished_by_length: int = 0
    num_finished_by_error: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def count_step(
        self, scheduled: list[ScheduledSequence], num_sampled: int, seconds: float
    ) -> tuple[int, int]:
        """Count a step that took `seconds` more than those before it.

        Args:
            scheduled: the step.
            num_sampled: tokens that sequences got from it.
            seconds: its time.

        Returns:
            Numbers of tokens that it computed for prefills, and for decodes.
        """
        decode = sum(item.num_tokens for item in scheduled if item.is_decode)
        prefill = sum(item.num_tokens for item in scheduled) - decode
        self.num_steps += 1
        self.num_prefill_tokens += prefill
        self.num_decode_tokens += decode
        self.num_sampled_tokens += num_sampled
        self.prefill_seconds += seconds if prefill else 0.0
        self.decode_seconds += seconds if decode else 0.0
        self.step_seconds += seconds
        return prefill, decode

    def count_finished(self, request: Request) -> None:
        """Count a request that ended."""
        self.num_finished += 1
        for seq in request.seqs:
            self.num_finished_by_stop += seq.finish_reason == "stop"
            self.num_finished_by_length += seq.finish_reason == "length"
            self.num_finished_by_error += seq.finish_reason == "error"
            self.num_generated_tokens += seq.num_completion_tokens
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_cached_tokens

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens of finished requests; 0 before the first."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def as_dict(self) -> dict[str, int | float]:
        """The counters by name."""
        return asdict(self)

    def add(self, other: "Metrics") -> None:
        """Count what another engine has done."""
        for name, value in other.as_dict().items():
            setattr(self, name, getattr(self, name) + value)

    def since(self, earlier: "Metrics") -> "Metrics":
        """Counts since the copy `earlier`."""
        before = earlier.as_dict()
        return Metrics(**{k: v - before[k] for k, v in self.as_dict().items()})  # type: ignore[arg-type]


class Latencies:
    """Histograms of the time, in seconds, of each step and of each request that has finished.

    A step lasts from its launch, or the end of the one before it, until its tokens are booked;
    with overlap that includes the caller's time between two calls of `step`.

    Attributes:
        prefill_step_seconds: steps in which a sequence prefilled.
        decode_step_seconds: steps in which a sequence decoded; a step with both is in both.
        queue_seconds, first_token_seconds, total_seconds: as in `RequestMetrics`.
        seconds_per_token: as in `RequestMetrics`, for requests with more than one token.
    """

    def __init__(self) -> None:
        self.prefill_step_seconds, self.decode_step_seconds = Histogram(), Histogram()
        self.queue_seconds, self.first_token_seconds = Histogram(), Histogram()
        self.seconds_per_token, self.total_seconds = Histogram(), Histogram()

    def add_step(self, seconds: float, prefill: int, decode: int) -> None:
        """Add a step that computed so many tokens for prefills and decodes."""
        if prefill:
            self.prefill_step_seconds.add(seconds)
        if decode:
            self.decode_step_seconds.add(seconds)

    def add_finished(self, metrics: RequestMetrics) -> None:
        """Add a request that ended."""
        self.queue_seconds.add(metrics.queue_seconds)
        self.first_token_seconds.add(metrics.first_token_seconds)
        self.total_seconds.add(metrics.total_seconds)
        if metrics.seconds_per_token is not None:
            self.seconds_per_token.add(metrics.seconds_per_token)

    def add(self, other: "Latencies") -> None:
        """Count those of another engine, too."""
        for name, histogram in vars(self).items():
            histogram.merge(vars(other)[name])

    def as_dict(self) -> dict[str, dict[str, int | float | None]]:
        """A summary of each, by name."""
        return {name: histogram.as_dict() for name, histogram in vars(self).items()}


class Progress:
    """A bar over `total` requests, with rates since it was opened, over all the time that passed:
    prompt tokens computed and tokens generated.
    """

    def __init__(self, total: int, metrics: Metrics, enabled: bool) -> None:
        self._metrics = metrics
        self._start, self._started_at = replace(metrics), time.perf_counter()
        options = SHOWN if enabled else SILENT
        self._bar = tqdm(total=total, desc="Generating", unit="req", **options)

    def update(self, num_finished: int) -> None:
        """Show the state after a step in which `num_finished` requests ended."""
        if self._bar.disable:
            return
        done, seconds = self._metrics.since(self._start), time.perf_counter() - self._started_at
        if done.num_steps:
            rates = {
                "input": f"{done.num_prefill_tokens / seconds:.0f} tok/s",
                "output": f"{done.num_sampled_tokens / seconds:.0f} tok/s",
            }
            self._bar.set_postfix(rates, refresh=False)
        self._bar.update(num_finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
