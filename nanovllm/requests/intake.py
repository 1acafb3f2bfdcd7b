"""`Intake`: what callers pass becomes requests, or one sentence that says what is wrong with it.

Everything is checked here, before anything is queued. Imports no torch.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput, TokenLogprobs
from nanovllm.requests.detokenizer import Detokenizer
from nanovllm.requests.inputs import (
    Params,
    Tokenizer,
    bad_word_tokens,
    check_vocabulary,
    encode,
    listed,
    special_stops,
    spread_sampling_params,
    whole_numbers,
)
from nanovllm.requests.request import Listener, Request, Ticket, Told, text_context
from nanovllm.requests.text import Decoder
from nanovllm.sampling.request_controls import RequestControls, request_controls
from nanovllm.sampling.structured_output import Grammar, GrammarCompiler
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice

T = TypeVar("T")
OnError: TypeAlias = Literal["raise", "return"]

OTHERS = '; on_error="return" completes the others'
PROMPT_KEYS = ("prompt", "prompt_token_ids")
TEXT_FIELDS = {  # of sampling parameters, and what there is for token ids
    "stop": "pass stop_token_ids",
    "bad_words": "pass logit_bias",
    "structured_outputs": "pass allowed_token_ids",
}


class CheckedRequest(NamedTuple):
    """What a caller wants, with nothing wrong in it.

    Attributes:
        text: the prompt, None if it came as token ids.
        token_ids: the prompt.
        params: how to sample.
        controls: what that means for the logits.
        grammars: one for each completion, None where its form is free.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    controls: RequestControls | None
    grammars: list[Grammar | None]


class Refusal(NamedTuple):
    """In the place of a request: the prompt if it was text, and what is wrong."""

    text: str | None
    error: str


class Intake:
    """The way into one engine.

    Args:
        tokenizer: of transformers; None if the model has none: what is about text is refused then.
        vocab_size: V; token ids must be below it.
        eos_token_ids: tokens that end a text.
        default: what None stands for as sampling parameters.
        grammars: compiles the forms of structured outputs.
        max_model_len: the most tokens of prompt and output, by the model and the options.
        pool_tokens: tokens that the KV pool holds.
        block_size: tokens of a KV block.
        seed: of requests without one.

    Attributes:
        decoder: gives the text of tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        default: SamplingParams,
        grammars: GrammarCompiler,
        *,
        max_model_len: int,
        pool_tokens: int,
        block_size: int,
        seed: int,
    ) -> None:
        self.decoder = Decoder(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids, self._default = eos_token_ids, default
        self._max_model_len, self._pool_tokens = max_model_len, pool_tokens
        self._block_size, self._seed = block_size, seed
        self._grammar_compiler = grammars
        self._num_requests = self._num_seqs = 0  # that have a number

    # -- checks ---------------------------------------------------------------------------------

    def check(self, prompt: Any, params: SamplingParams | None) -> CheckedRequest:
        """One prompt.

        Raises:
            TypeError, ValueError: naming what is wrong.
        """
        own = self._default if params is None else params
        controls = self.read_params(own)
        text, token_ids = self.read_prompt(prompt)
        return CheckedRequest(text, token_ids, own, controls, self._grammars(own, own.n))

    def read_again(self, token_ids: list[int], params: SamplingParams) -> CheckedRequest:
        """A prompt that another process has checked."""
        controls = self.read_params(params)
        return CheckedRequest(None, token_ids, params, controls, self._grammars(params, params.n))

    def check_all(
        self,
        prompts: Mapping[str, T],
        params: Params,
        on_error: OnError = "raise",
        render: Callable[[T, str], Any] | None = None,
    ) -> list[CheckedRequest | Refusal]:
        """Many prompts; see `LLMEngine.generate`.

        Args:
            prompts: by what errors call them.
            params: for all, for each, or None.
            on_error: "return" gives a `Refusal` in the place of a prompt with which, or with whose
                own parameters, something is wrong.
            render: makes prompts of what has their place; None: they are prompts.

        Raises:
            TypeError, ValueError: naming what is wrong, with one prompt or with the whole call.
        """
        check_choice("on_error", on_error, get_args(OnError))
        spread = spread_sampling_params(params, len(prompts), self._default)
        read: dict[int, RequestControls | None] = {}  # by identity: most often they are one object
        checked: list[CheckedRequest | Refusal] = []
        for (name, given), (params_name, own) in zip(prompts.items(), spread, strict=True):
            try:
                if id(own) not in read:
                    controls = self.read_params(own, params_name)
                    self._grammars(own, 1)  # is there one?
                    read[id(own)] = controls
                prompt = given if render is None else render(given, name)
                text, token_ids = self.read_prompt(prompt, name)
                grammars = self._grammars(own, own.n)
                checked.append(CheckedRequest(text, token_ids, own, read[id(own)], grammars))
            except (TypeError, ValueError) as error:
                concerns_all = id(own) not in read and params_name == "sampling_params"
                if on_error == "raise" or concerns_all:
                    raise
                shown = given.get("prompt") if isinstance(given, Mapping) else given
                checked.append(Refusal(shown if isinstance(shown, str) else None, str(error)))
        return checked

    def read_prompt(self, prompt: Any, name: str = "prompt") -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its tokens; `name` is what errors call it.

        Raises:
            TypeError, ValueError: naming what is wrong with it.
        """
        text, token_ids = None, prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - set(PROMPT_KEYS)
            if unknown or not prompt:
                hint = "; messages are for `chat`" if "role" in unknown else ""
                raise ValueError(
                    f"`{name}` must have the keys `prompt` or `prompt_token_ids`, and no others, "
                    f"got {sorted(map(str, prompt))}{hint}"
                )
            text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if given is None and "prompt" in prompt:
                token_ids = text
            elif (token_ids := listed(given)) is None:
                raise TypeError(
                    f'`{name}["prompt_token_ids"]` must hold token ids, got {type(given).__name__}'
                )
            if not isinstance(text, (str, type(None))) or token_ids is None:
                raise TypeError(f'`{name}["prompt"]` must be a string, got {type(text).__name__}')
        if isinstance(token_ids, str):
            text = token_ids
            if self._tokenizer is None:
                raise ValueError(
                    f"`{name}` is text, but the model directory has no tokenizer: pass token ids"
                )
            token_ids = encode(self._tokenizer, text, name)
        items = listed(token_ids)
        if items is None:
            raise TypeError(
                f"`{name}` must be a string, a list of token ids or a dictionary, "
                f"got {type(token_ids).__name__}"
            )
        ids = whole_numbers(items, name)
        check_vocabulary(name, ids, self._vocab_size)
        self._check_length(name, len(ids))
        return text, ids

    def _check_length(self, name: str, length: int) -> None:
        others = OTHERS if name.endswith("]") else ""  # there may be some
        if not length:
            raise ValueError(f"`{name}` must have at least one token, got none")
        if length >= self._max_model_len:
            raise ValueError(
                f"`{name}` must leave room for one token within max_model_len "
                f"{self._max_model_len}, got {length} tokens: shorten it, or raise "
                f"max_model_len if the model allows it{others}"
            )
        if length >= self._pool_tokens:
            raise ValueError(
                f"`{name}` must fit the KV cache of {self._pool_tokens} tokens and leave room for "
                f"one more, got {length} tokens: shorten it, or raise num_kvcache_blocks or "
                f"the memory for the cache{others}"
            )

    def read_params(
        self, params: SamplingParams, name: str = "sampling_params"
    ) -> RequestControls | None:
        """What sampling parameters mean for the logits; `name` is what errors call them.

        Raises:
            TypeError, ValueError: naming what is wrong with them that they cannot check themselves.
        """
        if not isinstance(params, SamplingParams):
            remedy = ": there is one prompt for them" if listed(params) is not None else ""
            raise TypeError(
                f"`{name}` must be a SamplingParams, got {type(params).__name__}{remedy}"
            )
        for field, remedy in TEXT_FIELDS.items() if self._tokenizer is None else ():
            if getattr(params, field):
                raise ValueError(
                    f"`{name}.{field}` is about text, but the model directory has no "
                    f"tokenizer: {remedy}"
                )
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            check_vocabulary(f"{name}.{field}", getattr(params, field) or (), self._vocab_size)
        self._stop_tokens(params, name)
        words: list[tuple[int, ...]] = []
        if self._tokenizer is not None and params.bad_words:
            words = bad_word_tokens(self._tokenizer, params.bad_words, f"{name}.bad_words")
            tokens = list(itertools.chain(*words))
            check_vocabulary(f"{name}.bad_words", tokens, self._vocab_size)
        return request_controls(params, self._vocab_size, self._eos_token_ids, words)

    def _stop_tokens(self, params: SamplingParams, name: str) -> dict[int, str]:
        """The stop strings that are special tokens without text, by their ids."""
        if not params.stop or not params.skip_special_tokens:
            return {}
        return special_stops(params.stop, self.decoder.special_tokens, f"{name}.stop")

    def _grammars(self, params: SamplingParams, count: int) -> list[Grammar | None]:
        """One for each of so many completions, which follows its own."""
        if (form := params.structured_outputs) is None:
            return [None] * count
        return [self._grammar_compiler.compile(form, params.ignore_eos) for _ in range(count)]

    # -- requests -------------------------------------------------------------------------------

    def refused(self, refusal: Refusal) -> RequestOutput:
        """What a prompt that was refused gets in the place of a result."""
        request_id = self.ticket(0).request_id
        return RequestOutput(request_id, refusal.text, [], [], True, 0, error=refusal.error)

    def ticket(self, n: int) -> Ticket:
        """For a new request of `n` completions."""
        ticket = Ticket(
            self._num_requests,
            self._num_seqs,
            time.perf_counter(),
            {index: Told() for index in range(n)},
        )
        self._num_requests += 1
        self._num_seqs += n
        return ticket

    def make(
        self,
        checked: CheckedRequest,
        pooling: str | None = None,
        listener: Listener | None = None,
        ticket: Ticket | None = None,
    ) -> Request:
        """The request, with its sequences.

        Args:
            checked: what is wanted.
            pooling: "last" or "mean" hidden state of the prompt, for embeddings.
            listener: see `LLMEngine.add_request`.
            ticket: of a request that came to another process; None: it is new.
        """
        text, token_ids, params, controls, grammars = checked
        ticket = ticket or self.ticket(params.n)
        prompt_logprobs = self._logprobs(params.prompt_logprobs, params)
        if prompt_logprobs is not None:
            prompt_logprobs.append_nothing()
        has_text = self._tokenizer is not None and params.detokenize
        is_followed = has_text and (bool(params.stop) or listener is not None)
        context = text_context(self.decoder, token_ids, params) if is_followed else []
        seqs: list[Sequence] = []
        for (index, told), grammar in zip(ticket.completions.items(), grammars, strict=False):
            detokenizer = self._detokenizer(params, context) if is_followed else None
            logprobs = self._logprobs(params.logprobs, params)
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
                    controls=controls,
                    grammar=grammar,
                    detokenizer=detokenizer,
                    logprobs=logprobs,
                    prompt_logprobs=None if seqs else prompt_logprobs,
                    pooling=pooling,
                    completion=told.token_ids,
                    arrived_at=ticket.arrived_at,
                )
            )
        return Request(ticket.request_id, text, token_ids, params, seqs, listener)

    def _detokenizer(self, params: SamplingParams, context: list[int]) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            params.stop or (),
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            context,
            self._stop_tokens(params, "sampling_params"),
        )

    def _logprobs(self, count: int | None, params: SamplingParams) -> TokenLogprobs | None:
        if count is None:
            return None
        text = self.decoder.token if params.detokenize else _no_text
        return TokenLogprobs(min(count, self._vocab_size), text)


def _catch_up(
    told: Told,
    params: SamplingParams,
    detokenizer: Detokenizer | None,
    logprobs: TokenLogprobs | None,
) -> None:
    """Bring a completion that began elsewhere to where its listener is."""
    if detokenizer is not None:
        for count, token_id in enumerate(told.token_ids, 1):
            detokenizer.append(token_id, may_stop=count > params.min_tokens)
        detokenizer.take()
    if logprobs is not None:
        for _ in told.token_ids:
            logprobs.append_nothing()
        logprobs.total = told.logprob


def _no_text(token_id: int) -> None:
    """For tokens whose text is not wanted."""
