"""`Request`: a prompt with its completions, from `add_request` to its `RequestOutput`.

It begins as a `CheckedRequest`; a `Ticket` has its ids, and the state of its completions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from nanovllm.engine.sequence import Sequence
from nanovllm.images.image import PlacedImage
from nanovllm.images.picture import PlacedPicture
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.requests.text import Decoder
from nanovllm.sampling.request_controls import RequestControls
from nanovllm.sampling.structured_output import Grammar
from nanovllm.sampling_params import SamplingParams

Listener: TypeAlias = Callable[[RequestOutput], None]


@dataclass
class Told:
    """The part of a completion that its listener knows.

    Attributes:
        token_ids: tokens so far.
        logprob: sum of their log-probabilities, if those are asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0


class Ticket(NamedTuple):
    """The identity of a request, which tells it from others that ask for the same.

    Attributes:
        request_id: id of the request, for the caller.
        seq_id: id of its first completion; the next ones have the next ids.
        arrived_at: time of arrival, in seconds of time.perf_counter, one clock for all processes.
        completions: completions that have not ended, by index, with the tokens from which they
            continue.
    """

    request_id: int
    seq_id: int
    arrived_at: float
    completions: dict[int, Told]


class CheckedRequest(NamedTuple):
    """A request of a caller, free of mistakes.

    Attributes:
        text: text of the prompt; None if it came as token ids.
        token_ids: token ids of the prompt.
        params: sampling parameters.
        controls: effect of the parameters on the logits; None: none.
        grammars: one for each completion, None if its form is free.
        images: images of the prompt, in order.
        pictures: the same before they are prepared; empty then.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    controls: RequestControls | None
    grammars: list[Grammar | None]
    images: tuple[PlacedImage, ...] = ()
    pictures: tuple[PlacedPicture, ...] = ()


class Refusal(NamedTuple):
    """A mistake in the place of a request: the prompt, if it was text, and the error."""

    text: str | None
    error: str


class Request:
    """A prompt of a caller, with its completions.

    Args:
        request_id: id of the request, for the caller.
        prompt: text of the prompt; None if it came as token ids.
        prompt_token_ids: token ids of the prompt.
        params: sampling parameters of all completions.
        seqs: one sequence for each completion.
        listener: function that gets new output; then it alone is told of the request's end.

    Attributes:
        weight_version: version of the weights that compute it, see `LLM.update_weights`.
    """

    weight_version: int | str = 0

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seqs: list[Sequence],
        listener: Listener | None = None,
    ) -> None:
        self.request_id, self.params, self.seqs = request_id, params, seqs
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.listener = listener
        self._num_told = [seq.num_completion_tokens for seq in seqs]
        self._ends_told = [False] * len(seqs)

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)

    def metrics(self) -> RequestMetrics:
        """The times that this request spent waiting and computing."""
        assert self.is_finished, f"request {self.request_id} has not finished"
        seqs, arrived_at = self.seqs, self.seqs[0].arrived_at
        return RequestMetrics(
            queue_seconds=min(seq.started_at for seq in seqs) - arrived_at,
            first_token_seconds=min(seq.first_token_at for seq in seqs) - arrived_at,
            total_seconds=max(seq.finished_at for seq in seqs) - arrived_at,
            num_preemptions=sum(seq.num_preemptions for seq in seqs),
            decode_seconds=sum(seq.finished_at - seq.first_token_at for seq in seqs),
            num_decode_tokens=sum(max(seq.num_completion_tokens - 1, 0) for seq in seqs),
        )

    def output(self, decode: Decoder) -> RequestOutput:
        """The result of the finished request."""
        assert self.is_finished, f"request {self.request_id} has not finished"
        context: list[int] = []
        if self.params.detokenize and self.seqs[0].detokenizer is None:
            context = text_context(decode, self.prompt_token_ids, self.params)
        completions = [self._whole(seq, decode, context) for seq in self.seqs]
        return self._output(completions, is_finished=True)

    def _output(self, completions: list[CompletionOutput], *, is_finished: bool) -> RequestOutput:
        first = self.seqs[0]
        return RequestOutput.of(
            {
                "request_id": self.request_id,
                "prompt": self.prompt,
                "prompt_token_ids": self.prompt_token_ids,
                "outputs": completions,
                "finished": is_finished,
                "num_cached_tokens": first.num_cached_tokens,
                "prompt_logprobs": first.results.prompt_logprobs,
                "embedding": first.results.embedding,
                "metrics": self.metrics() if is_finished else None,
                "error": next(
                    (seq.end.error for seq in self.seqs if seq.end and seq.end.error), None
                ),
                "weight_version": self.weight_version,
            }
        )

    def tell(self) -> None:
        """Give the listener new output: tokens, and the text that no later token can change."""
        news, is_finished = [], True
        for i, seq in enumerate(self.seqs):
            if not seq.is_finished:
                is_finished = False
            elif seq.finish_reason is None:
                return  # aborted, by another listener
            prompt = seq.num_prompt_tokens
            start, end = self._num_told[i], seq.num_known_tokens - prompt
            if end > start or (seq.is_finished and not self._ends_told[i]):
                self._num_told[i], self._ends_told[i] = end, seq.is_finished
                text = "" if seq.detokenizer is None else seq.detokenizer.take()
                token_ids = seq.token_ids[prompt + start : prompt + end]
                logprobs = None if seq.results.logprobs is None else seq.results.logprobs[start:end]
                mask = seq.results.sampling_mask
                if mask is not None:
                    mask.extend_to(end)
                masks = None if mask is None else mask[start:end]
                news.append(_completion(seq, text, token_ids, logprobs, masks))
        if news and self.listener is not None:
            self.listener(self._output(news, is_finished=is_finished))

    def _whole(self, seq: Sequence, decode: Decoder, context: list[int]) -> CompletionOutput:
        token_ids = seq.completion_token_ids
        assert seq.end is not None, f"{seq!r} has not finished"
        text = ""
        if seq.detokenizer is not None:
            text = seq.detokenizer.text
        elif self.params.detokenize:
            hides = seq.end.is_by_token and not self.params.include_stop_str_in_output
            shown = token_ids[:-1] if hides else token_ids  # without the token that ended it
            text = decode(shown, self.params.skip_special_tokens, context)
        mask = seq.results.sampling_mask
        if mask is not None:
            mask.extend_to(len(token_ids))
        return _completion(seq, text, token_ids, seq.results.logprobs, mask)


def text_context(decode: Decoder, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens before a completion on which its text depends. A structured output keeps its form
    from its first character on, which may be a space.
    """
    has_form = params.structured_outputs is not None
    return decode.context(prompt, params.skip_special_tokens, keeps_first_space=has_form)


def _completion(
    seq: Sequence, text: str, token_ids: list[int], logprobs: Any, mask: Any
) -> CompletionOutput:
    return CompletionOutput.of(
        {
            "index": seq.index,
            "text": text,
            "token_ids": token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": None if seq.end is None else seq.end.stop_reason,
            "logprobs": logprobs,
            "cumulative_logprob": None
            if seq.results.logprobs is None
            else seq.results.logprobs.total,
            "sampling_mask": mask,
        }
    )
