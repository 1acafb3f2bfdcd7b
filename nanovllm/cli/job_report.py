"""Reports of a job on standard error: a bar meanwhile, and a summary at the end."""

import sys
import time

from tqdm import tqdm

from nanovllm.batch.results import Result
from nanovllm.batch.sink import ResumableSink, StreamSink


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"nanovllm generate: {text}", file=sys.stderr)


class Report:
    """A count of results, shown inside a `with` block as a bar, which TQDM_DISABLE=1 turns off.

    Args:
        sink: output of the job.
        total: number of rows in the input; None if it is not known.
        output: name of the output; None for standard output.
    """

    def __init__(
        self, sink: ResumableSink | StreamSink, total: int | None, output: str | None
    ) -> None:
        self._sink, self._total, self._output = sink, total, output
        self._before, self._num_tokens, self._began = sink.num_finished, 0, time.perf_counter()
        self._first_error = ""

    def __enter__(self) -> "Report":
        self._before, self._began = self._sink.num_finished, time.perf_counter()
        options = {"desc": "Generating", "unit": "row", "smoothing": 0}  # mean rate of the run
        self._bar = tqdm(total=self._total, initial=self._before, **options)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def add(self, result: Result) -> None:
        """Count a result that has been written."""
        self._num_tokens += result.num_generated_tokens
        if result.error is not None and not self._first_error:
            self._first_error = f"row {result.row.number} (counting from 0): {result.error}"
        if not self._bar.disable:
            rate = self._num_tokens / (time.perf_counter() - self._began)
            shown = f"{rate:,.0f} tok/s, {self._sink.num_errors} errors"
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()

    def end(self, is_complete: bool) -> None:
        """Print the summary.

        Args:
            is_complete: whether no row is left.
        """
        sink, seconds = self._sink, time.perf_counter() - self._began
        new = sink.num_finished - self._before
        of = "" if self._total is None else f" of {self._total:,}"
        where = "" if self._output is None else f" in {self._output}"
        finished = sink.num_finished - (sink.num_strangers if is_complete else 0)
        say(f"{finished:,}{of} rows{where}, {sink.num_errors:,} with errors")
        if new:
            rate = f"{self._num_tokens:,} tokens, {self._num_tokens / seconds:,.0f} tok/s"
            say(f"{new:,} rows in {seconds:.1f} s, {rate}")
        if self._first_error:
            say(f"the first error of this run: {self._first_error}")
        if self._output is None:
            return
        if not is_complete:
            say("the same command continues from here")
            return
        if sink.num_errors:
            say("with --retry-errors, the same command computes rows with errors again")
        if sink.num_strangers:
            say(f"{sink.num_strangers:,} results belong to rows that are no longer in the input")
