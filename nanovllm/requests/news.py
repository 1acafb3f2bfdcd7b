"""`News`: a request's output that its caller has not taken yet; `AllNews`: all its output so far.

An output is several objects, and Python's garbage collector counts those that exist at once: if
outputs of all requests waited for their callers, it would look through all objects of the process
once in some hundred steps, for a tenth of a second and more. So new output is added to the output
that already waits, and an output object is made when its caller takes it.
"""

import io
import threading
from functools import cached_property
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


class News:
    """The news of a request: outputs that each continue the one before, joined to one if the caller
    comes late. One thread adds, another may take.

    Attributes:
        has_some: whether there is news to take.
    """

    _last: RequestOutput  # added last; kept when taken, so that the next one replaces it

    def __init__(self) -> None:
        self.has_some = False
        self._growing: dict[int, _Growing] = {}
        self._lock = threading.Lock()

    def add(self, news: RequestOutput) -> None:
        """Add a new output."""
        with self._lock:
            for part in news.outputs:
                growing = self._growing.get(part.index)
                if growing is None:
                    growing = self._growing[part.index] = _Growing()
                    self._growing = dict(sorted(self._growing.items()))
                growing.add(part)
            self._last, self.has_some = news, True

    def take(self) -> RequestOutput:
        """An output of all that has been added since the last call."""
        with self._lock:
            assert self.has_some, "there is no news"
            self.has_some = False
            return RequestOutput.of({**vars(self._last), "outputs": self._take()})

    def _take(self) -> list[CompletionOutput]:
        return [growing.take() for growing in self._growing.values() if growing.has_some]


class AllNews(News):
    """News of which each output has all that was ever added. A token is copied when it is added and
    when a caller reads `token_ids`, `text`, `logprobs` or `sampling_mask`; not for outputs that
    nobody reads.
    """

    def _take(self) -> list[CompletionOutput]:
        return [growing.so_far() for growing in self._growing.values()]


class _Growing:
    """A completion that may continue.

    Attributes:
        token_ids, text, logprobs, masks: parts added so far. They only grow, so that a beginning of
            them never changes.
        last: part that was added last.
        has_some: whether a part was added since the last `take`; one that ends by an error may have
            no tokens.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = io.StringIO()
        self.logprobs: list[dict[int, Logprob]] = []
        self.masks: list[list[int] | None] = []
        self.has_some = False
        self._so_far: CompletionOutput | None = None

    def add(self, part: CompletionOutput) -> None:
        self.token_ids += part.token_ids
        if part.text:
            self.text.write(part.text)
        if part.logprobs is not None:
            self.logprobs += part.logprobs
        if part.sampling_mask is not None:
            self.masks += part.sampling_mask
        self.last, self.has_some, self._so_far = part, True, None

    def take(self) -> CompletionOutput:
        """The parts added so far, which are then forgotten."""
        taken = self._output(self.token_ids, self.logprobs, self.masks)
        self.token_ids, self.logprobs, self.masks, self.has_some = [], [], [], False
        if self.text.tell():
            self.text = io.StringIO()
        return taken

    def so_far(self) -> CompletionOutput:
        """The parts added so far, which are kept."""
        if self._so_far is None:
            if self.last.finished():
                self._so_far = self._output(self.token_ids[:], self.logprobs[:], self.masks[:])
            else:
                self._so_far = self._beginning()
        return self._so_far

    def _output(
        self,
        token_ids: list[int],
        logprobs: list[dict[int, Logprob]],
        masks: list[list[int] | None],
    ) -> CompletionOutput:
        last = self.last
        made = {
            "text": self.text.getvalue(),
            "token_ids": token_ids,
            "logprobs": None if last.logprobs is None else logprobs,
            "sampling_mask": None if last.sampling_mask is None else masks,
        }
        return CompletionOutput.of({**vars(last), **made})

    def _beginning(self) -> "CompletionSoFar":
        last = self.last
        return CompletionSoFar.of(
            {
                "index": last.index,
                "finish_reason": None,
                "cumulative_logprob": last.cumulative_logprob,
                "_growing": self,
                "_num_tokens": len(self.token_ids),
                "_num_chars": self.text.tell(),
            }
        )


class CompletionSoFar(CompletionOutput):
    """A completion that continues after this output. Its long attributes are made when they are
    read: most outputs are not, and the next one has all of it again.
    """

    _growing: _Growing
    _num_tokens: int
    _num_chars: int

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return self._growing.text.getvalue()[: self._num_chars]

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._growing.token_ids[: self._num_tokens]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # type: ignore[override]
        has_logprobs = self._growing.last.logprobs is not None
        return self._growing.logprobs[: self._num_tokens] if has_logprobs else None

    @cached_property
    def sampling_mask(self) -> list[list[int] | None] | None:  # type: ignore[override]
        has_mask = self._growing.last.sampling_mask is not None
        return self._growing.masks[: self._num_tokens] if has_mask else None

    def _plain(self) -> CompletionOutput:
        return CompletionOutput(*(getattr(self, each.name) for each in self._fields))

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, CompletionSoFar) else other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain `CompletionOutput`: what this output shows, and no more."""
        return CompletionOutput, tuple(getattr(self, each.name) for each in self._fields)
