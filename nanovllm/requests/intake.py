"""`Intake`: checks callers' arguments and makes requests, or one sentence about the mistake.

Everything is checked here, before anything is queued. Imports no torch.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from nanovllm.images.image import PlacedImage
from nanovllm.images.picture import PlacedPicture, SizedPicture
from nanovllm.images.prompts import ImagePrompts, NoImages, remedies
from nanovllm.outputs import Mistake, RequestOutput
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
from nanovllm.requests.request import CheckedRequest, Listener, Refusal, Request, Ticket, Told
from nanovllm.requests.samples import Samples
from nanovllm.requests.text import Decoder
from nanovllm.sampling.request_controls import RequestControls, request_controls
from nanovllm.sampling.structured_output import Grammar, GrammarCompiler
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice

T = TypeVar("T")
OnError: TypeAlias = Literal["raise", "return"]

OTHERS = '; on_error="return" completes the others'
PROMPT_KEYS = ("prompt", "prompt_token_ids")
IMAGE_KEYS = ("multi_modal_data", "mm_processor_kwargs")  # beside these
TOKEN_FIELDS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
TEXT_FIELDS = {  # sampling parameters that need a tokenizer, and the remedies without one
    "stop": "pass stop_token_ids",
    "bad_words": "pass logit_bias",
    "structured_outputs": "pass allowed_token_ids",
}


class ReadPrompt(NamedTuple):
    """A prompt of a caller.

    Attributes:
        text: its text; None if it came as token ids.
        token_ids: its token ids, with all placeholders of images.
        pictures: its images, which are not prepared.
    """

    text: str | None
    token_ids: list[int]
    pictures: tuple[PlacedPicture, ...]


class Intake:
    """The way into one engine.

    Args:
        tokenizer: tokenizer of transformers; None: the model has none, and parameters that are
            about text are refused.
        vocab_size: V; token ids must be below it.
        eos_token_ids: tokens that end a text.
        default: sampling parameters used in place of None.
        grammars: compiler of the forms of structured outputs.
        max_model_len: maximum length of prompt and output together, in tokens, by the model and the
            options.
        pool_tokens: tokens that fit the KV pool.
        block_size: tokens of a KV block.
        seed: seed of requests without one.
        logprobs_mode: mode of requests without one, see `SamplingParams`.

    Attributes:
        decoder: decoder of tokens to text.
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
        logprobs_mode: str,
    ) -> None:
        self.decoder = Decoder(tokenizer)
        self._samples = Samples(tokenizer, self.decoder, vocab_size, block_size, seed)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids, self._default = eos_token_ids, default
        self._max_model_len, self._pool_tokens = max_model_len, pool_tokens
        self._grammar_compiler, self._logprobs_mode = grammars, logprobs_mode
        self._num_requests = self._num_seqs = 0  # ids given out so far
        self._images: ImagePrompts | NoImages = NoImages("this engine reads none")

    def bind_images(self, images: ImagePrompts | NoImages) -> None:
        """Read the images of prompts, or say why not."""
        self._images = images

    # -- checks ---------------------------------------------------------------------------------

    def check(
        self,
        prompt: Any,
        params: SamplingParams | None,
        grammars: list[Grammar | None] | None = None,
    ) -> CheckedRequest:
        """Check one prompt.

        Args:
            prompt: prompt.
            params: sampling parameters; None: the default.
            grammars: result of `compile_form` for them; None: it is made here.

        Raises:
            TypeError, ValueError: naming the mistake.
        """
        own = self._default if params is None else params
        controls = self.read_params(own)
        text, token_ids, pictures = self.read_prompt(prompt)
        if grammars is None:
            grammars = self._grammars(own, own.n)
        return CheckedRequest(text, token_ids, own, controls, grammars, pictures=pictures)

    def read_again(
        self,
        token_ids: list[int],
        params: SamplingParams,
        images: tuple[PlacedImage, ...] = (),
    ) -> CheckedRequest:
        """Read a prompt that another process has checked."""
        controls, grammars = self.read_params(params), self._grammars(params, params.n)
        return CheckedRequest(None, token_ids, params, controls, grammars, images)

    def check_all(
        self,
        prompts: Mapping[str, T],
        params: Params,
        on_error: OnError = "raise",
        render: Callable[[T, str], Any] | None = None,
    ) -> list[CheckedRequest | Refusal]:
        """Check many prompts; see `LLMEngine.generate`.

        Args:
            prompts: prompts, keyed by their names in errors.
            params: sampling parameters for all, for each, or None.
            on_error: "return" puts a `Refusal` in the place of a prompt that has a mistake, or
                whose own parameters have one.
            render: function that makes a prompt of each value of `prompts` and its name; None: the
                values are prompts.

        Raises:
            TypeError, ValueError: naming the mistake in one prompt or in the whole call.
        """
        check_choice("on_error", on_error, get_args(OnError))
        spread = spread_sampling_params(params, len(prompts), self._default)
        read: dict[int, RequestControls | None] = {}  # by identity: most often all are one object

        def controls_of(own: SamplingParams, params_name: str) -> RequestControls | None:
            if id(own) not in read:
                controls = self.read_params(own, params_name)
                self._grammars(own, 1)  # raises if there is none
                read[id(own)] = controls
            return read[id(own)]

        if prompts and (params is None or isinstance(params, SamplingParams)):
            params_name, own = spread[0]
            controls_of(own, params_name)  # a mistake in them is no single prompt's: it is raised
        checked: list[CheckedRequest | Refusal] = []
        for (name, given), (params_name, own) in zip(prompts.items(), spread, strict=True):
            try:
                controls = controls_of(own, params_name)
                prompt = given if render is None else render(given, name)
                text, token_ids, pictures = self.read_prompt(prompt, name)
                grammars = self._grammars(own, own.n)
                checked.append(
                    CheckedRequest(text, token_ids, own, controls, grammars, pictures=pictures)
                )
            except (TypeError, ValueError) as error:
                if on_error == "raise":
                    raise
                shown = given.get("prompt") if isinstance(given, Mapping) else given
                checked.append(Refusal(shown if isinstance(shown, str) else None, str(error)))
        return checked

    def read_prompt(self, prompt: Any, name: str = "prompt") -> ReadPrompt:
        """Read a prompt. `name` stands for it in errors.

        Raises:
            TypeError, ValueError: naming the mistake.
        """
        text, token_ids, data, limits = None, prompt, None, None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {*PROMPT_KEYS, *IMAGE_KEYS}
            if unknown or not set(prompt) & set(PROMPT_KEYS):
                hint = "; messages are for `chat`" if "role" in unknown else ""
                raise ValueError(
                    f"`{name}` must have the keys `prompt` or `prompt_token_ids`, with images "
                    "`multi_modal_data`, and no others, "
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
            data, limits = (prompt.get(key) for key in IMAGE_KEYS)
        images = self._images.open(data, limits, name)
        if isinstance(token_ids, str):
            text = token_ids
            if self._tokenizer is None:
                raise ValueError(
                    f"`{name}` is text, but the model directory has no tokenizer: pass token ids"
                )
            tokenised = self._images.in_text(text) if images else text
            token_ids = encode(self._tokenizer, tokenised, name)
        items = listed(token_ids)
        if items is None:
            raise TypeError(
                f"`{name}` must be a string, a list of token ids or a dictionary, "
                f"got {type(token_ids).__name__}"
            )
        ids = whole_numbers(items, name)
        check_vocabulary(name, ids, self._vocab_size)
        ids, pictures = self._images.place(ids, images, name)
        self._check_length(name, len(ids), images)
        return ReadPrompt(text, ids, pictures)

    def _check_length(self, name: str, length: int, images: Sequence[SizedPicture]) -> None:
        if not length:
            raise ValueError(f"`{name}` must have at least one token, got none")
        others = OTHERS if name.endswith("]") else ""  # it may be one of several
        of_images = sum(image.num_tokens for image in images)
        count = f"{length} tokens" + f" ({of_images} of images)" * bool(images)
        if length >= (limit := self._max_model_len):
            ways = remedies(length, images, limit, "raise max_model_len if the model allows it")
            raise ValueError(
                f"`{name}` must leave room for one token within max_model_len {limit}, got "
                f"{count}: {ways}{others}"
            )
        if length >= (limit := self._pool_tokens):
            longer = "raise num_kvcache_blocks or the memory for the cache"
            ways = remedies(length, images, limit, longer)
            raise ValueError(
                f"`{name}` must fit the KV cache of {limit} tokens and leave room for one more, "
                f"got {count}: {ways}{others}"
            )

    def read_params(
        self, params: SamplingParams, name: str = "sampling_params"
    ) -> RequestControls | None:
        """The effect of sampling parameters on the logits. `name` stands for them in errors.

        Raises:
            TypeError, ValueError: naming a mistake that `SamplingParams` cannot find itself.
        """
        if not isinstance(params, SamplingParams):
            remedy = ": there is one prompt for them" if listed(params) is not None else ""
            raise TypeError(
                f"`{name}` must be a SamplingParams, got {type(params).__name__}{remedy}"
            )
        for field, remedy in TEXT_FIELDS.items() if self._tokenizer is None else ():
            if getattr(params, field):
                raise ValueError(
                    f"`{name}.{field}` needs a tokenizer, but the model directory has none: "
                    f"{remedy}"
                )
        for field in TOKEN_FIELDS:
            check_vocabulary(f"{name}.{field}", getattr(params, field) or (), self._vocab_size)
        special_stops(params, self.decoder.special_tokens, name)
        words: list[tuple[int, ...]] = []
        if self._tokenizer is not None and params.bad_words:
            words = bad_word_tokens(self._tokenizer, params.bad_words, f"{name}.bad_words")
            tokens = list(itertools.chain(*words))
            check_vocabulary(f"{name}.bad_words", tokens, self._vocab_size)
        return request_controls(
            params, self._vocab_size, self._eos_token_ids, words, self._logprobs_mode
        )

    def has_form(self, params: SamplingParams | None) -> bool:
        """Whether sampling parameters ask for a form, which takes time to compile."""
        own = self._default if params is None else params
        return getattr(own, "structured_outputs", None) is not None

    def compile_form(self, params: SamplingParams | None) -> list[Grammar | None]:
        """The grammars of a request. May be called in any thread.

        Raises:
            TypeError, ValueError: naming the mistake.
        """
        own = self._default if params is None else params
        self.read_params(own)  # its mistakes come first
        return self._grammars(own, own.n)

    def _grammars(self, params: SamplingParams, count: int) -> list[Grammar | None]:
        """A grammar for each of `count` completions, since each is followed separately."""
        if (form := params.structured_outputs) is None:
            return [None] * count
        return [self._grammar_compiler.compile(form, params.ignore_eos) for _ in range(count)]

    # -- requests -------------------------------------------------------------------------------

    def refused(self, refusal: Refusal) -> RequestOutput:
        """The output of a refused prompt, in the place of a result."""
        request_id, error = self.ticket(0).request_id, Mistake(refusal.error)
        return RequestOutput(request_id, refusal.text, [], [], True, 0, error=error)

    def ticket(self, n: int) -> Ticket:
        """A ticket for a new request of `n` completions."""
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
        """Make a request and its sequences.

        Args:
            checked: request of the caller, checked.
            pooling: "last" or "mean" hidden state of the prompt, for embeddings.
            listener: function that gets outputs, see `LLMEngine.add_request`.
            ticket: ticket that another process gave to the request; None: the request is new.
        """
        ticket = ticket or self.ticket(checked.params.n)
        seqs = self._samples.make(checked, ticket, pooling, is_heard=listener is not None)
        return Request(
            ticket.request_id, checked.text, checked.token_ids, checked.params, seqs, listener
        )
