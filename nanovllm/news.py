"""News of a request made one: `joined` for `AsyncLLM.stream`, `Whole` for `AsyncLLM.generate`.

News are outputs of `LLM.stream`: each has what the ones before it have not.
"""

import io
from dataclasses import fields
from functools import cached_property
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


def joined(news: list[RequestOutput]) -> RequestOutput:
    """Several outputs of a request, in their order, as one."""
    if len(news) == 1:
        return news[0]
    parts: dict[int, _Growing] = {}
    for output in news:
        for part in output.outputs:
            parts.setdefault(part.index, _Growing()).add(part)
    return _with_outputs(news[-1], [parts[index].output() for index in sorted(parts)])


class Whole:
    """The outputs of a request so far. A token is copied when it comes, and when a caller reads
    `token_ids`, `text` or `logprobs` of an output, but not for outputs that nobody reads.
    """

    def __init__(self) -> None:
        self._growing: dict[int, _Growing] = {}
        self._outputs: dict[int, CompletionOutput] = {}

    def add(self, news: list[RequestOutput]) -> RequestOutput:
        """Everything up to these outputs."""
        for output in news:
            for part in output.outputs:
                self._growing.setdefault(part.index, _Growing()).add(part)
        for index in {part.index for output in news for part in output.outputs}:
            self._outputs[index] = self._growing[index].so_far()
        return _with_outputs(news[-1], [self._outputs[index] for index in sorted(self._outputs)])


def _with_outputs(last: RequestOutput, outputs: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput(**{**vars(last), "outputs": outputs})


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

    def add(self, part: CompletionOutput) -> None:
        self.token_ids += part.token_ids
        self.text.write(part.text)
        self.logprobs += part.logprobs or ()
        self.last = part

    def output(self) -> CompletionOutput:
        """All of it, when no more comes."""
        has_logprobs = self.last.logprobs is not None
        changes = {
            "text": self.text.getvalue(),
            "token_ids": self.token_ids,
            "logprobs": self.logprobs if has_logprobs else None,
        }
        return CompletionOutput(**{**vars(self.last), **changes})

    def so_far(self) -> CompletionOutput:
        """All of it, whether or not more comes."""
        return self.output() if self.last.finished() else CompletionSoFar._of(self)


class CompletionSoFar(CompletionOutput):
    """A completion that goes on after this output. What is long is made when it is read: most
    outputs are not, and the next one has all of it again.
    """

    _growing: _Growing
    _num_tokens: int
    _num_chars: int

    @classmethod
    def _of(cls, growing: _Growing) -> "CompletionSoFar":
        made, last = object.__new__(cls), growing.last
        vars(made).update(
            index=last.index,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            cumulative_logprob=last.cumulative_logprob,
            _growing=growing,
            _num_tokens=len(growing.token_ids),
            _num_chars=growing.text.tell(),
        )
        return made

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
        return CompletionOutput(*(getattr(self, each.name) for each in fields(self)))

    def __eq__(self, other: object) -> bool:
        other = other._plain() if isinstance(other, CompletionSoFar) else other
        return self._plain() == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or one for another process, has no more than this output shows."""
        return CompletionOutput, tuple(getattr(self, each.name) for each in fields(self))
