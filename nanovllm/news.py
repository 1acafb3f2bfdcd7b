"""News of a request made one: `joined` for `AsyncLLM.stream`, `Whole` for `AsyncLLM.generate`.

News are outputs of `LLM.stream`: each has what the ones before it have not.
"""

import io
from functools import cached_property
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


def joined(news: list[RequestOutput]) -> RequestOutput:
    """Several outputs of a request, in their order, as one."""
    return news[0] if len(news) == 1 else Whole().add(news)


class Whole:
    """The outputs of a request so far. A token is copied when it comes, and when a caller reads
    `token_ids`, `text` or `logprobs` of an output, but not for outputs that nobody reads.
    """

    def __init__(self) -> None:
        self._growing: dict[int, _Growing] = {}

    def add(self, news: list[RequestOutput]) -> RequestOutput:
        """Everything up to these outputs."""
        for output in news:
            for part in output.outputs:
                if part.index not in self._growing:
                    self._growing[part.index] = _Growing()
                    self._growing = dict(sorted(self._growing.items()))
                self._growing[part.index].add(part)
        outputs = [growing.so_far() for growing in self._growing.values()]
        return RequestOutput.of({**vars(news[-1]), "outputs": outputs})


class _Growing:
    """A completion, of which more comes.

    Attributes:
        token_ids, text, logprobs: all so far. They only grow, so that a beginning of them stays
            what it is.
        last: the part that came last.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = io.StringIO()
        self.logprobs: list[dict[int, Logprob]] = []
        self._so_far: CompletionOutput | None = None

    def add(self, part: CompletionOutput) -> None:
        self.token_ids += part.token_ids
        self.text.write(part.text)
        if part.logprobs is not None:
            self.logprobs += part.logprobs
        self.last, self._so_far = part, None

    def so_far(self) -> CompletionOutput:
        """All of it."""
        if self._so_far is None:
            make = self._whole if self.last.finished() else self._beginning
            self._so_far = make()
        return self._so_far

    def _whole(self) -> CompletionOutput:
        whole = {
            "text": self.text.getvalue(),
            "token_ids": self.token_ids,
            "logprobs": None if self.last.logprobs is None else self.logprobs,
        }
        return CompletionOutput.of({**vars(self.last), **whole})

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
    """A completion that goes on after this output. What is long is made when it is read: most
    outputs are not, and the next one has all of it again.
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

    def _plain(self) -> CompletionOutput:
        return CompletionOutput(*(getattr(self, each.name) for each in self._fields))

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, CompletionSoFar) else other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and other processes: with what this output shows, and no more."""
        return CompletionOutput, tuple(getattr(self, each.name) for each in self._fields)
