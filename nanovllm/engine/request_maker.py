"""`RequestMaker`: checks what callers pass, and makes requests of it. Imports no torch."""

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.inputs import (
    Params,
    ParsedParams,
    ParsedPrompt,
    PromptReader,
    SamplingParamsReader,
    spread_sampling_params,
)
from nanovllm.engine.request import Decoder, Listener, Request
from nanovllm.engine.request_controls import RequestControls
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.structured_output import Grammar, GrammarCompiler
from nanovllm.outputs import RequestOutput, TokenLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice

T = TypeVar("T")
OnError: TypeAlias = Literal["raise", "return"]


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


class RequestMaker:
    """Makes the requests of one engine.

    Args:
        prompts: reads prompts.
        params: reads sampling parameters.
        tokenizer: None if the model has none.
        vocab_size: V.
        eos_token_ids: tokens that end a text.
        block_size: tokens of a KV block.
        seed: of requests without one.

    Attributes:
        decoder: gives the text of tokens.
    """

    def __init__(
        self,
        prompts: PromptReader,
        params: SamplingParamsReader,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        block_size: int,
        seed: int,
    ) -> None:
        self.prompts, self.params = prompts, params
        self.decoder = Decoder(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._block_size, self._seed = block_size, seed
        self._compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self._request_ids, self._seq_ids = itertools.count(), itertools.count()

    def check(self, prompt: Any, params: SamplingParams | None) -> CheckedRequest:
        """One prompt.

        Raises:
            TypeError, ValueError: naming what is wrong.
        """
        own = self.params.parse(params)
        return self._checked(self.prompts.parse(prompt), own)

    def check_all(
        self,
        prompts: Mapping[str, T],
        params: Params,
        on_error: OnError = "raise",
        read: Callable[[T, str], ParsedPrompt] | None = None,
    ) -> list[CheckedRequest | Refusal]:
        """Many prompts; see `LLMEngine.generate`.

        Args:
            prompts: by what errors call them.
            params: for all, for each, or None.
            on_error: "return" gives a `Refusal` in the place of a prompt with which, or with whose
                own parameters, something is wrong.
            read: makes prompts of what has their place; None: they are prompts.

        Raises:
            TypeError, ValueError: naming what is wrong, with one prompt or with the whole call.
        """
        check_choice("on_error", on_error, get_args(OnError))
        read = read or self.prompts.parse
        spread = spread_sampling_params(params, len(prompts), self.params.default)
        parsed: dict[int, ParsedParams] = {}  # by their identity: most often they are one object
        checked: list[CheckedRequest | Refusal] = []
        for (name, prompt), (params_name, own) in zip(prompts.items(), spread, strict=True):
            try:
                if id(own) not in parsed:
                    parsed[id(own)] = self._parse_params(own, params_name)
                checked.append(self._checked(read(prompt, name), parsed[id(own)]))
            except (TypeError, ValueError) as error:
                concerns_all = id(own) not in parsed and params_name == "sampling_params"
                if on_error == "raise" or concerns_all:
                    raise
                text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
                checked.append(Refusal(text if isinstance(text, str) else None, str(error)))
        return checked

    def _parse_params(self, params: SamplingParams, name: str) -> ParsedParams:
        """Including the form that they ask for, though each completion follows its own."""
        parsed = self.params.parse(params, name)
        if params.structured_outputs is not None:
            self._compiler.compile(params.structured_outputs, params.ignore_eos)
        return parsed

    def _checked(self, prompt: ParsedPrompt, parsed: ParsedParams) -> CheckedRequest:
        return CheckedRequest(*prompt, *parsed, self._grammars(parsed))

    def _grammars(self, parsed: ParsedParams) -> list[Grammar | None]:
        params = parsed.params
        if (form := params.structured_outputs) is None:
            return [None] * params.n
        return [self._compiler.compile(form, params.ignore_eos) for _ in range(params.n)]

    def refused(self, refusal: Refusal) -> RequestOutput:
        """What a prompt that was refused gets in the place of a result."""
        request_id = next(self._request_ids)
        return RequestOutput(request_id, refusal.text, [], [], True, 0, error=refusal.error)

    def make(
        self,
        checked: CheckedRequest,
        pooling: str | None = None,
        listener: Listener | None = None,
    ) -> Request:
        """The request, with its sequences.

        Args:
            checked: what is wanted.
            pooling: "last" or "mean" hidden state of the prompt, for embeddings.
            listener: see `LLMEngine.add_request`.
        """
        text, token_ids, params, controls, grammars = checked
        request_id, seqs = next(self._request_ids), []
        for index, grammar in enumerate(grammars):
            seq = Sequence(
                next(self._seq_ids),
                token_ids,
                params,
                block_size=self._block_size,
                seed=self._seed,
                index=index,
            )
            seq.request_id = request_id
            seq.controls, seq.grammar, seq.pooling = controls, grammar, pooling
            is_heard = listener is not None and params.detokenize
            if params.stop or (is_heard and self._tokenizer is not None):
                seq.detokenizer = Detokenizer(
                    self._tokenizer,
                    params.stop or (),
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                )
            seq.logprobs = self._logprobs(params.logprobs, params.detokenize)
            seqs.append(seq)
        seqs[0].prompt_logprobs = self._logprobs(params.prompt_logprobs, params.detokenize)
        if seqs[0].prompt_logprobs is not None:
            seqs[0].prompt_logprobs.append_nothing()
        return Request(request_id, text, token_ids, params, seqs, listener)

    def _logprobs(self, count: int | None, detokenize: bool) -> TokenLogprobs | None:
        if count is None:
            return None
        text = self.decoder.token if detokenize else _no_text
        return TokenLogprobs(min(count, self._vocab_size), text)


def _no_text(token_id: int) -> None:
    """For tokens whose text is not wanted."""
