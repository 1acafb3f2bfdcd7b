"""`Samples`: makes the sequences of a request's `n` samples, each from where it stands."""

from collections.abc import Collection

from nanovllm.engine.sequence import Results, Sequence
from nanovllm.outputs import TokenLogprobs
from nanovllm.requests.detokenizer import Detokenizer
from nanovllm.requests.inputs import Tokenizer, special_stops
from nanovllm.requests.request import CheckedRequest, Ticket, Told, text_context
from nanovllm.requests.text import Decoder
from nanovllm.sampling_params import SamplingParams
from nanovllm.token_sets import TokenSets


class Samples:
    """The samples of one engine's requests.

    Args:
        tokenizer: tokenizer of transformers; None: the model has none, and samples have no text.
        decoder: decoder of tokens to text.
        vocab_size: V, the most log-probabilities that a token can have.
        block_size: tokens of a KV block.
        seed: seed of requests without one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        decoder: Decoder,
        vocab_size: int,
        block_size: int,
        seed: int,
    ) -> None:
        self._tokenizer, self._decoder = tokenizer, decoder
        self._vocab_size, self._block_size, self._seed = vocab_size, block_size, seed

    def make(
        self, checked: CheckedRequest, ticket: Ticket, pooling: str | None, *, is_heard: bool
    ) -> list[Sequence]:
        """Make a sequence for each completion of the ticket. The first has the prompt's
        log-probabilities for all.

        Args:
            checked: request of the caller.
            ticket: its ids, and the tokens from which its completions continue.
            pooling: "last" or "mean" hidden state of the prompt, for embeddings.
            is_heard: whether a listener is told of text before the end.
        """
        params, token_ids = checked.params, checked.token_ids
        prompt_logprobs = self._logprobs(params.prompt_logprobs, params)
        if prompt_logprobs is not None:
            prompt_logprobs.append_nothing()
        has_text = self._tokenizer is not None and params.detokenize
        is_followed = has_text and (bool(params.stop) or is_heard)
        context = text_context(self._decoder, token_ids, params) if is_followed else []
        seqs: list[Sequence] = []
        # The ticket lacks completions that have ended; grammars are all alike at their beginning.
        completions = zip(ticket.completions.items(), checked.grammars, strict=False)
        for (index, told), grammar in completions:
            detokenizer = self._detokenizer(params, context) if is_followed else None
            logprobs = self._logprobs(params.logprobs, params, params.logprob_token_ids)
            mask = TokenSets(self._vocab_size) if params.return_sampling_mask else None
            if told.token_ids:
                _catch_up(told, params, detokenizer, logprobs)
            seqs.append(
                Sequence(
                    ticket.seq_id + index,
                    token_ids,
                    params,
                    block_size=self._block_size,
                    seed=self._seed,
                    index=index,
                    request_id=ticket.request_id,
                    controls=checked.controls,
                    grammar=grammar,
                    detokenizer=detokenizer,
                    results=Results(
                        logprobs, None if seqs else prompt_logprobs, sampling_mask=mask
                    ),
                    pooling=pooling,
                    images=checked.images,
                    completion=told.token_ids,
                    arrived_at=ticket.arrived_at,
                )
            )
        return seqs

    def _detokenizer(self, params: SamplingParams, context: list[int]) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            params.stop or (),
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            context,
            special_stops(params, self._decoder.special_tokens),
        )

    def _logprobs(
        self, count: int | None, params: SamplingParams, labels: Collection[int] | None = None
    ) -> TokenLogprobs | None:
        text = self._decoder.token if params.detokenize else _no_text
        if labels is not None:
            return TokenLogprobs(len(labels), text, of_labels=True)
        return None if count is None else TokenLogprobs(min(count, self._vocab_size), text)


def _catch_up(
    told: Told,
    params: SamplingParams,
    detokenizer: Detokenizer | None,
    logprobs: TokenLogprobs | None,
) -> None:
    """Bring a completion that began in another process to the state that its listener knows."""
    if detokenizer is not None:
        for count, token_id in enumerate(told.token_ids, 1):
            detokenizer.append(token_id, may_stop=count > params.min_tokens)
        detokenizer.take()
    if logprobs is not None:
        for _ in told.token_ids:
            logprobs.append_nothing()
        logprobs.total = told.logprob


def _no_text(token_id: int) -> None:
    """Stand in for a token's text where no text is wanted: None."""
