"""`RequestMaker`: checks what callers pass, and makes requests of it. Imports no torch."""

import itertools
from collections.abc import Collection
from collections.abc import Sequence as SequenceABC
from typing import Any, NamedTuple

from nanovllm.engine.controls import RequestControls
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.inputs import (
    ParsedParams,
    ParsedPrompt,
    PromptReader,
    Prompts,
    SamplingParamsReader,
)
from nanovllm.engine.request import Decoder, Listener, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.structured_output import Grammar, GrammarCompiler
from nanovllm.outputs import TokenLogprobs
from nanovllm.sampling_params import SamplingParams


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
        self, prompts: Prompts, params: SamplingParams | SequenceABC[SamplingParams] | None
    ) -> list[CheckedRequest]:
        """One prompt or many; see `LLMEngine.generate`."""
        return self.check_parsed(self.prompts.parse_all(prompts), params)

    def check_parsed(
        self,
        prompts: SequenceABC[ParsedPrompt],
        params: SamplingParams | SequenceABC[SamplingParams] | None,
    ) -> list[CheckedRequest]:
        """The same for prompts that have been read."""
        spread = self.params.parse_all(params, len(prompts))
        return [self._checked(*pair) for pair in zip(prompts, spread, strict=True)]

    def _checked(self, prompt: ParsedPrompt, parsed: ParsedParams) -> CheckedRequest:
        form, n = parsed.params.structured_outputs, parsed.params.n
        grammars = [None if form is None else self._compiler.compile(form) for _ in range(n)]
        return CheckedRequest(*prompt, *parsed, grammars)

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
            seq.logprobs = self._logprobs(params.logprobs)
            seqs.append(seq)
        seqs[0].prompt_logprobs = self._logprobs(params.prompt_logprobs)
        if seqs[0].prompt_logprobs is not None:
            seqs[0].prompt_logprobs.append_nothing()
        return Request(request_id, text, token_ids, params, seqs, listener)

    def _logprobs(self, count: int | None) -> TokenLogprobs | None:
        if count is None:
            return None
        return TokenLogprobs(min(count, self._vocab_size), self.decoder.token)
