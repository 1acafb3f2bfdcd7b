"""`LLM`: the user's class. It adds streams, chats, scores and embeddings to the engine."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Self

from nanovllm.arrivals.image_prompts import make_image_prompts, read_own_processor
from nanovllm.arrivals.waiting_core import Make, WaitingCore
from nanovllm.config import FOREIGN_ARGUMENTS, FOREIGN_RESET
from nanovllm.engine.assembly import AnyExecutor, Parts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.images.preparation import BESIDE, MAX_BYTES, MAX_THREADS, Preparation
from nanovllm.images.prompts import NoImages
from nanovllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoreOutput,
)
from nanovllm.replicas import assembly as replica_assembly
from nanovllm.replicas.remote_request import remote
from nanovllm.replicas.supervisor import Replicas
from nanovllm.requests.beam_search import Candidates, beam_search
from nanovllm.requests.chat import ChatRenderer, Conversation, Tool, name_conversations
from nanovllm.requests.inputs import Params, Prompts, encode, listed, name_prompts
from nanovllm.requests.intake import OnError
from nanovllm.requests.news import News
from nanovllm.requests.renderings import rendered_ahead
from nanovllm.requests.request import CheckedRequest, Listener, Refusal
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.sizing.memory import available_cpu_memory
from nanovllm.tracing.recorder import DEFAULT_PATH
from nanovllm.updates.interface import Updatable
from nanovllm.utils.checks import check_bool, check_choice, check_int
from nanovllm.utils.options import Absent, takes_foreign

POOLING = ("last", "mean")
# For requests that are not about what is generated. Those that ignore the end of a text are left
# out of the lengths that admission learns: after many single tokens it would expect no others.
ONE_TOKEN = SamplingParams(
    temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs_mode="raw_logprobs"
)
SCORED = replace(ONE_TOKEN, prompt_logprobs=0)


class LLM(Updatable, LLMEngine):
    """An offline engine for one model: `LLM(directory, **options).generate(prompts)`.

    All options are those of `nanovllm.config.Config`. Use it as a context manager, or call
    `exit()`, to give the memory back at a known time.
    """

    # Whether requests that run are computed again by new weights; else these are refused meanwhile.
    _begins_again = False

    def _make_executor(self) -> AnyExecutor:
        self._processor = read_own_processor(self.config, self.model_config)
        if self.config.data_parallel_size > 1:
            return Replicas(self.config)
        return super()._make_executor()

    def _assemble(self) -> Parts:
        make: Make
        if isinstance(self.executor, Replicas):
            facts = self.executor.start(beside=self._prepare_text)
            entrance = self._make_entrance(facts.max_model_len, facts.pool_tokens)
            parts = replica_assembly.assemble(self.executor, facts, self.config, entrance)
            make = partial(remote, parts.intake)
        else:
            parts = super()._assemble()
            make = parts.intake.make
        self.image_prompts = make_image_prompts(
            self._processor, self.config, self.model_config, self.tokenizer
        )
        parts.intake.bind_images(self.image_prompts)
        if isinstance(self.image_prompts, NoImages):
            return parts
        memory = min(MAX_BYTES, available_cpu_memory() // 4)
        computes_here = self.config.data_parallel_size == 1  # and needs Python's lock
        preparation = Preparation(
            self.image_prompts.processor,
            num_beside=BESIDE if computes_here else MAX_THREADS,
            max_bytes=memory,
        )
        core = WaitingCore(
            parts.core, parts.intake, make, preparation, self.config.max_num_batched_tokens
        )
        return parts._replace(core=core, make=core.make)

    @takes_foreign(FOREIGN_ARGUMENTS)
    def stream(
        self, prompts: Prompts, sampling_params: Params = None, *, on_error: OnError = "raise"
    ) -> Iterator[RequestOutput]:
        """Complete prompts, and give what is new after each step.

        Each output has the completions with news, of these the new tokens and the text that is
        certain: half a character, and a possible beginning of a stop string, are held back. All
        texts of a completion together are the text that `generate` returns. An output with
        `finished` is the last of its prompt. Several steps of other calls bring one output.

        Leaving the loop drops what is not finished. Between its steps other requests may be added.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            on_error: as for `generate`.

        Yields:
            Outputs of all prompts, as they come; `request_id` grows in the order of the prompts.

        Raises:
            TypeError, ValueError: naming the argument that is wrong, before anything is queued.
        """
        named = name_prompts(prompts)  # an iterable may take its time, or call the engine
        with self._lock:
            self._check_ready()
            checked = self._intake.check_all(named, sampling_params, on_error)
        return self._stream(checked)

    def _stream(self, checked: list[CheckedRequest | Refusal]) -> Iterator[RequestOutput]:
        told: deque[News] = deque()
        left: set[int] = set()

        def listener() -> Listener:
            news = News()

            def listen(output: RequestOutput) -> None:
                news.add(output)
                told.append(news)

            return listen

        try:
            with self._lock:
                requests = []
                for item in checked:
                    if isinstance(item, Refusal):
                        listener()(self._intake.refused(item))
                    else:
                        requests.append(self._make(item, None, listener()))
                left.update(request.request_id for request in requests)  # before any is queued
                for request in requests:
                    self.core.add(request)
            while left or told:
                with self._lock:
                    if not told:
                        self._check_ready()
                        if left.isdisjoint(self.core.requests):
                            raise RuntimeError(
                                "requests of this stream have been aborted, or dropped by an error "
                                "in another call"
                            )
                        self._advance()
                while told:
                    news = told.popleft()
                    if not news.has_some:  # it was told twice, and taken once
                        continue
                    output = news.take()
                    if output.finished:
                        left.discard(output.request_id)  # which a refused prompt is not in
                    yield output
        finally:
            self.core.abort_later(left)

    def score(
        self, prompts: Prompts, *, use_tqdm: bool = True, on_error: OnError = "raise"
    ) -> list[ScoreOutput]:
        """The log-probabilities of texts, token by token: for perplexity, and to compare answers.

        (vLLM's `score` is another thing: it compares pairs of texts by models for that.)

        Logits are computed for some hundred tokens at a time, so long texts need no more memory.

        Args:
            prompts: as for `generate`; each leaves room for one token within `max_model_len`.
            use_tqdm: show a progress bar.
            on_error: as for `generate`.

        Returns:
            One for each prompt, in their order.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        outputs = self.generate(prompts, SCORED, use_tqdm, on_error=on_error)
        return [score_of(output) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        labels: Sequence[str | int],
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[ClassificationOutput]:
        """The probabilities of labels as the next token, by the model alone: to judge, to grade, to
        rerank.

        (vLLM's `classify` is for models with a layer of their own for labels.)

        Args:
            prompts: as for `generate`.
            labels: at least two tokens, by their ids, or as texts of one token each, in the form
                that they have after the prompt: " yes" after "Answer:", say.
            use_tqdm: show a progress bar.
            on_error: as for `generate`.

        Returns:
            One for each prompt, in their order.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        tokens = label_tokens(self.tokenizer, labels)
        params = replace(ONE_TOKEN, logprob_token_ids=tokens)
        outputs = self.generate(prompts, params, use_tqdm, on_error=on_error)
        return [classification_of(output, tokens) for output in outputs]

    def embed(
        self,
        prompts: Prompts,
        pooling: str = "last",
        *,
        normalize: bool = True,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[EmbeddingRequestOutput]:
        """Texts as vectors: hidden states after the final norm.

        Args:
            prompts: as for `generate`.
            pooling: "last" takes that of the last token, "mean" the mean over all tokens.
            normalize: scale each vector to length 1.
            use_tqdm: show a progress bar.
            on_error: as for `generate`.

        Returns:
            One for each prompt, in their order.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        check_embedding(pooling, normalize)
        checked = self._intake.check_all(name_prompts(prompts), ONE_TOKEN, on_error)
        outputs = self._complete(checked, use_tqdm, pooling)
        return [embedding_of(output, normalize) for output in outputs]

    @takes_foreign(FOREIGN_ARGUMENTS)
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: one conversation or a list of them, or another iterable. A conversation is a
                list of dictionaries with `role` and `content`: a string, or a list of
                `{"type": "text", "text": ...}`, which become its lines, and of images (see
                docs/reference/images.md). `arguments` of `tool_calls`
                are objects or JSON. The role `developer` becomes `system` where the template does
                not name it; OpenAI's older `function` and `function_call` become `tool` and
                `tool_calls`, a `refusal` is content, and keys that are None are left out. Other
                keys are the template's.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            on_error: as in `generate`; conversations are refused likewise.
            chat_template: a Jinja template; None for the checkpoint's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: leave the last message open, for the model to go on with; needs
                `add_generation_prompt=False`.
            tools: functions that the model may call, with types and docstrings, or JSON Schemas.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.

        Returns:
            One output per conversation, in their order. `prompt` is what the template made of it.

        Raises:
            TypeError, ValueError: naming the argument that is wrong; nothing has been queued.
            RuntimeError: as in `generate`.
        """
        renderer = ChatRenderer(
            self.tokenizer,
            self.image_prompts,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        named = name_conversations(messages)
        if self.image_prompts.fetches:
            with rendered_ahead(renderer.render, named) as render:
                checked = self._intake.check_all(named, sampling_params, on_error, render)
        else:
            checked = self._intake.check_all(named, sampling_params, on_error, renderer.render)
        return self._complete(checked, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        on_error: OnError = "raise",
    ) -> list[BeamSearchOutput]:
        """Find likely continuations of prompts by beam search.

        Each step is a `generate` of one token for all beams, most of whose tokens the prefix cache
        serves; `metrics` counts them as requests. Images are prepared before the first step, and
        those of all prompts stay in memory until the last.

        Args:
            prompts: as in `generate`.
            params: parameters for all prompts.
            use_tqdm: show a progress bar.
            on_error: as in `generate`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError, RuntimeError: as in `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"`params` must be a BeamSearchParams, got {type(params).__name__}")
        check_bool("use_tqdm", use_tqdm)
        count = min(2 * params.beam_width, self.model_config.vocab_size)
        one_token = replace(ONE_TOKEN, logprobs=count)

        named = name_prompts(prompts)
        with self._lock:
            self._check_ready()
            checked = self._intake.check_all(named, one_token, on_error)
            self._check_alone()
            checked = self.core.with_images(checked)
            accepted = [item for item in checked if not isinstance(item, Refusal)]
            found = beam_search(
                [item.token_ids for item in accepted],
                params,
                partial(self._next_tokens, accepted),
                eos_token_ids=self.eos_token_ids,
                max_model_len=self.max_model_len,
                use_tqdm=use_tqdm,
            )
            outputs = (
                BeamSearchOutput([], item)
                if isinstance(item, str)
                else BeamSearchOutput([*map(self._with_text, item)])
                for item in found
            )
            return [
                BeamSearchOutput([], item.error) if isinstance(item, Refusal) else next(outputs)
                for item in checked
            ]

    def _next_tokens(
        self, prompts: list[CheckedRequest], sequences: list[tuple[int, list[int]]]
    ) -> list[Candidates | str]:
        """The next tokens of sequences, each the number of its prompt and its tokens."""
        beams = [prompts[i]._replace(text=None, token_ids=tokens) for i, tokens in sequences]
        return [_candidates(output) for output in self._complete([*beams], use_tqdm=False)]

    def _with_text(self, beam: BeamSearchSequence) -> BeamSearchSequence:
        return replace(beam, text=self._intake.decoder(beam.tokens, skip_special_tokens=False))

    # -- between and around calls ---------------------------------------------------------------

    @takes_foreign(FOREIGN_RESET)
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, so that the next run computes every prompt.

        Raises:
            RuntimeError: if requests are left.
        """
        with self._lock:
            self._check_open()
            if not self.core.is_idle():
                raise RuntimeError(
                    "reset_prefix_cache() needs an engine without requests: finish them, or drop "
                    "them with abort_all()"
                )
            self.core.reset()

    @contextmanager
    def _changing_memory(self) -> Iterator[None]:
        """Nothing is computed during the block. An error that leaves the ranks in different states
        closes the engine.
        """
        with self._lock:
            self._check_updatable()
            try:
                yield
            except BaseException:
                if self.executor.is_broken:
                    self._close_quietly()
                raise

    def _check_updatable(self) -> None:
        self._check_open()
        if not self.core.is_idle() and not self._begins_again:
            raise RuntimeError(
                "weights and memory cannot change while requests are left: finish them, or drop "
                "them with abort_all()"
            )

    @contextmanager
    def trace(self, path: str | Path = DEFAULT_PATH) -> Iterator[None]:
        """Record the work during a `with` block, in Chrome's trace format.

        The file is for https://ui.perfetto.dev and for `nanovllm report`. It is written during
        the block and completed after it, even after an error. It has times and counts, no text.

        Args:
            path: path of the file, a new one or an earlier trace, which is overwritten.

        Raises:
            RuntimeError: if the engine is closed, or is recording already.
            TypeError, ValueError: if it is not a path, or the file must not be overwritten.
        """
        with self._lock:
            self._check_open()
            self._recorder.open(path)
        try:
            with self._lock:
                self._recorder.start(self.core, self._facts)
            yield
        finally:
            if not self._lock.is_forked:  # else the parent goes on
                with self._lock:
                    self.core.timeline = None
                    self._recorder.stop()

    # -- facts, and what vLLM calls otherwise ---------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer (of transformers), None if it has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default of `generate` and `add_request`, as the checkpoint says.

        See `nanovllm.checkpoint.generation_config.read_sampling_params`. `dataclasses.replace`
        changes a copy.
        """
        return self._default_params

    get_metrics = Absent("call metrics()")

    @property
    def llm_engine(self) -> Self:
        """The engine itself; vLLM has a separate object."""
        return self

    def shutdown(self) -> None:
        """`exit`, as vLLM calls it."""
        self.exit()


def _candidates(output: RequestOutput) -> Candidates | str:
    """Next tokens, or why there are none."""
    if output.error is not None:
        return output.error
    logprobs = output.outputs[0].logprobs
    first = logprobs[0] if logprobs else None
    assert first is not None, "the log-probabilities of next tokens are missing"
    return {token: item.logprob for token, item in first.items()}


def score_of(output: RequestOutput) -> ScoreOutput:
    """The log-probabilities of a prompt that was completed with `SCORED`."""
    token_ids, places = output.prompt_token_ids, output.prompt_logprobs
    if output.error is not None:
        return ScoreOutput(token_ids, [], [], output.error)
    assert places is not None, "the log-probabilities of the prompt are missing"
    own = [places[i][token_ids[i]] for i in range(1, len(token_ids))]
    logprobs = [item.logprob for item in own]
    ranks = [item.rank or 0 for item in own]  # labels alone have none
    return ScoreOutput(token_ids, logprobs, ranks)


def label_tokens(tokenizer: Any, labels: Sequence[str | int]) -> list[int]:
    """The tokens of labels.

    Raises:
        TypeError, ValueError: naming the label that is none.
    """
    items = listed(labels)
    if items is None:
        raise TypeError(f"`labels` must be a list of texts or token ids, got {labels!r}")
    tokens = []
    for i, label in enumerate(items):
        if not isinstance(label, str):
            check_int(f"labels[{i}]", label, 0)
            tokens.append(int(label))
            continue
        if tokenizer is None:
            raise ValueError(
                f"`labels[{i}]` is text, but the model directory has no tokenizer: pass token ids"
            )
        found = encode(tokenizer, label, f"labels[{i}]", add_special_tokens=False)
        if len(found) != 1:
            raise ValueError(
                f"`labels[{i}]` must be a text of one token, got {label!r} with {len(found)}: pass "
                "another, or a token id"
            )
        tokens += found
    if len(set(tokens)) < max(len(tokens), 2):
        raise ValueError(f"`labels` must be at least two different tokens, got {items!r}")
    return tokens


def classification_of(output: RequestOutput, tokens: Sequence[int]) -> ClassificationOutput:
    """The probabilities of tokens by the output of a prompt that asked for them as labels."""
    if output.error is not None:
        return ClassificationOutput(output.prompt_token_ids, [], 0.0, output.error)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "the log-probabilities of labels are missing"
    own = [logprobs[0][token].logprob for token in tokens]
    largest = max(own)  # of which nothing is too small for a float
    weights = [math.exp(logprob - largest) for logprob in own]
    total = math.fsum(weights)
    probs = [weight / total for weight in weights]
    return ClassificationOutput(output.prompt_token_ids, probs, min(1.0, total * math.exp(largest)))


def check_embedding(pooling: Any, normalize: Any) -> None:
    """Raise unless these are arguments of `LLM.embed`."""
    check_choice("pooling", pooling, POOLING)
    check_bool("normalize", normalize)


def embedding_of(output: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    """The vector of a prompt, of length 1 with `normalize`."""
    vector = output.embedding if output.error is None else None
    assert vector is not None or output.error
    if vector and normalize:
        length = math.hypot(*vector) or 1.0
        vector = [value / length for value in vector]
    embedding, token_ids = EmbeddingOutput(vector or []), output.prompt_token_ids
    return EmbeddingRequestOutput(output.request_id, embedding, token_ids, True, output.error)
