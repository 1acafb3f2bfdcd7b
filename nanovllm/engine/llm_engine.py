"""`LLMEngine`: requests in, outputs out.

Callers take turns here; `Intake` checks what they pass, and `EngineCore.step` is the loop.
`assembly.py` puts these together. Other calls are in `llm.py`.
"""

import logging
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import Self, Unpack

from nanovllm.adapters.adapter import open_adapters
from nanovllm.adapters.directory import adapter_directories, warn_of_templates
from nanovllm.checkpoint.generation_config import read_sampling_params
from nanovllm.checkpoint.hub import checkpoint_directory, checkpoint_name
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import FOREIGN_ARGUMENTS, Config, Options, our_options, takes_options
from nanovllm.engine.assembly import AnyExecutor, Entrance, Parts, assemble, make_entrance
from nanovllm.engine.executor import Executor
from nanovllm.models.loader import as_stored, check_adapters, without_unusable_vision
from nanovllm.outputs import RequestOutput
from nanovllm.requests.inputs import Params, Prompts, name_prompts
from nanovllm.requests.intake import OnError
from nanovllm.requests.request import CheckedRequest, Listener, Refusal
from nanovllm.sampling.structured_output import Grammar, GrammarCompiler
from nanovllm.sampling_params import SamplingParams
from nanovllm.threads.fair_lock import FairLock
from nanovllm.tracing.metrics import Progress
from nanovllm.tracing.recorder import DEFAULT_PATH, Recorder, engine_facts
from nanovllm.updates.hold import Hold
from nanovllm.updates.sleeping import Sleeping
from nanovllm.updates.updating import NO_ADAPTER, WeightUpdates
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.options import takes_foreign

logger = logging.getLogger(__name__)


class LLMEngine:
    """An engine for one model.

    `generate` is the whole job in one call. `add_request`, `step`, `is_finished` and `abort` are
    the same job in the caller's hands. All methods may be called from any thread; they take turns
    in the order of their calls, and a `generate` keeps its turn until it is done. A forked process
    has no engine: there they raise RuntimeError, and `exit` does nothing.

    Args:
        model: directory of a Hugging Face checkpoint, or its name on the hub (`Qwen/Qwen3-0.6B`),
            which is downloaded unless it is in the hub's cache.
        options: fields of `nanovllm.config.Config`.

    Raises:
        TypeError: for an unknown option or one of the wrong type.
        ValueError: for an option out of range, and for a checkpoint that cannot be run.
    """

    _shown: tuple[str, ...] = ()  # facts for `repr`, as many as are known yet

    @takes_options
    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        self._lock = FairLock()
        ours = our_options(options)
        if not isinstance(model, (str, Path)):
            raise TypeError(
                f"`model` must be the directory of a checkpoint, or its name, got {model!r}"
            )
        config = Config(os.path.expanduser(model), **ours)
        weights = config.load_format != "dummy"
        directory = checkpoint_directory(config.model, config.revision, weights=weights)
        adapters = adapter_directories(config.adapters)
        self.config = replace(config, model=directory, adapter=adapters)
        self.model_config = ModelConfig.from_pretrained(
            self.config.model, language_model_only=config.language_model_only
        )
        self.model_config = without_unusable_vision(
            self.model_config, Path(directory), has_weights=weights
        )
        if weights:
            self.model_config = as_stored(self.model_config, Path(directory))
            check_adapters(open_adapters(adapters), Path(directory), self.model_config)
            warn_of_templates(adapters, Path(directory))
        self._shown = repr(self.config.model), self.model_config.architecture
        self.model_config.check_tensor_parallel(self.config.tensor_parallel_size)
        self._default_params = SamplingParams()
        if self.config.generation_config == "auto":
            self._default_params = read_sampling_params(self.config.model)
        self.executor = self._make_executor()
        # Runs once: in exit(), when nobody holds the engine any more, or when Python ends, and
        # then before modules and CUDA are torn down in an order that nobody knows.
        self._recorder = Recorder()
        self._close = weakref.finalize(self, _close, self.executor, self._recorder, self._lock)
        try:
            if config.trace:
                self._recorder.open(DEFAULT_PATH if config.trace is True else config.trace)
            self._start()
            self._recorder.start(self.core, self._facts)
        except BaseException:
            self._close_quietly()
            raise

    def _make_executor(self) -> AnyExecutor:
        return Executor(self.config, self.model_config)

    def _assemble(self) -> Parts:
        """Start what computes, and put the rest before it."""
        assert isinstance(self.executor, Executor)
        runner = self.executor.start(beside=self._prepare_text)
        built = runner.built
        entrance = self._make_entrance(built.build.max_model_len, built.pool_tokens)
        return assemble(self.executor, runner, self.config, entrance)

    def _make_entrance(self, max_model_len: int, pool_tokens: int) -> Entrance:
        return make_entrance(
            max_model_len,
            pool_tokens,
            self.config,
            self.model_config,
            self.tokenizer,
            self.eos_token_ids,
            self._default_params,
            self._grammars,
        )

    def _start(self) -> None:
        self.executor.launch()  # the rest runs beside the start of other processes
        parts = self._assemble()
        self.core, self._intake, self._make = parts.core, parts.intake, parts.make
        self._describe, self.max_model_len = parts.describe, parts.max_model_len
        self._memory = parts.memory
        self._hold = Hold(parts.core)
        names = map(checkpoint_name, self.config.adapters)
        self._updates = WeightUpdates(parts.memory, self._hold, ", ".join(names) or NO_ADAPTER)
        self._sleeping = Sleeping(self._hold, parts.memory, self._updates.lose)
        if parts.own is not None:
            self.scheduler, self.model_runner = parts.own
        chosen = self._describe()
        self._shown += (
            f"{chosen['dtype']} on {chosen['device']}",
            f"{chosen['attention_backend']} attention",
            f"{parts.num_blocks} blocks of {self.config.kvcache_block_size}",
            *parts.remarks,
        )

    def _prepare_text(self, has_time: bool) -> None:
        """Load the tokenizer, and if there is time for it what only structured outputs need."""
        # In this thread: an interrupt amid its own imports would let those of others wait for ever.
        tokenizer = self.tokenizer = load_tokenizer(self.config.model)
        self.eos_token_ids = set(self.model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self.eos_token_ids.add(tokenizer.eos_token_id)
        vocab_size = self.model_config.vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_token_ids)
        if has_time:
            self._grammars.prepare()

    def _facts(self) -> dict[str, Any]:
        """Facts about the engine, for a recording."""
        return engine_facts(self.config, self.model_config, self._describe())

    def __repr__(self) -> str:
        shown = [*self._shown]
        if hasattr(self, "_updates") and self._updates.adapter != NO_ADAPTER:
            shown.append(f"adapter {self._updates.adapter!r}")
        if hasattr(self, "_close") and self.is_closed:  # it may be half built
            shown.append("closed")
        return f"{type(self).__name__}({', '.join(shown)})"

    # -- the step API ---------------------------------------------------------------------------

    @takes_foreign(FOREIGN_ARGUMENTS)
    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        listener: Listener | None = None,
    ) -> int:
        """Queue one prompt (text, token ids or a dictionary; see `generate`).

        Args:
            prompt: the prompt.
            sampling_params: None for those of `get_default_sampling_params`.
            listener: function called with the news after each step, in the form of `stream`;
                `step` does not return the request then. It may call the engine, too. An error that
                it raises comes out of `step`, and other listeners may miss news by it.

        Returns:
            The request's id, found again in `RequestOutput.request_id`.
        """
        return self._enter(prompt, sampling_params, None, listener)

    def _enter(
        self,
        prompt: Any,
        params: SamplingParams | None,
        pooling: str | None,
        listener: Listener | None,
        grammars: list[Grammar | None] | None = None,
    ) -> int:
        """Check one prompt and queue it; see `add_request`, `Intake.check` and `Intake.make`."""
        with self._lock:
            self._check_ready()
            if listener is not None and not callable(listener):
                raise TypeError(f"`listener` must be callable, got {type(listener).__name__}")
            return self._add(self._intake.check(prompt, params, grammars), pooling, listener)

    def _add(
        self, checked: CheckedRequest, pooling: str | None = None, listener: Listener | None = None
    ) -> int:
        request = self._make(checked, pooling, listener)
        self.core.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Launch a step, and book the one before it. Returns the requests that have ended.

        With `overlap` the device computes the new step while the host books the old one and
        chooses the next; without, each step is booked before the next is chosen.

        If the model fails (out of memory, say), the requests stay queued: call `step` again, or
        `abort` them. If Ctrl-C hits the scheduler while it changes its books, they are dropped.
        """
        with self._lock:
            self._advance()
            return self._take_finished()

    def _advance(self) -> None:
        self._check_ready()
        try:
            self.core.step()
        except BaseException:
            if self.executor.is_broken:
                self._close_quietly()
            raise

    def _take_finished(self) -> list[RequestOutput]:
        outputs = [request.output(self._intake.decoder) for request in self.core.finished]
        self.core.forget_finished()
        return outputs

    @property
    def is_closed(self) -> bool:
        """Whether `exit` was called, or an error has closed the engine."""
        return not self._close.alive

    def is_finished(self) -> bool:
        """Whether no request is left."""
        with self._lock:
            self._check_open()
            return self.core.is_idle()

    def abort(self, request_id: int) -> bool:
        """Drop a request. False if it is not there (it may have finished)."""
        check_int("request_id", request_id, 0)
        with self._lock:
            self._check_open()
            return self.core.abort([request_id]) > 0

    def abort_all(self) -> None:
        """Drop all requests, also those of streams, and results that `step` has not returned."""
        with self._lock:
            self._check_open()
            self.core.abort_all()

    # -- the whole job --------------------------------------------------------------------------

    @takes_foreign(FOREIGN_ARGUMENTS)
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or a list of them. A prompt is a string, a list of token ids, or
                a dictionary with `prompt` or `prompt_token_ids`, and for models that see with
                `multi_modal_data` (docs/reference/images.md); lists may mix them. In the place of a
                list any iterable will do: an array, a column of pandas, a generator.
            sampling_params: one for all prompts, one per prompt, or None for those of
                `get_default_sampling_params`.
            use_tqdm: show a progress bar, with prompt and output tokens per second since the call.
            on_error: "raise" refuses all prompts where something is wrong with one of them (it is
                too long, say), or with its own parameters; "return" completes the others, and that
                one's output says in `error` what is wrong.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: naming the argument that is wrong; nothing has been queued.
            RuntimeError: if the engine is closed, or busy with requests of other calls.
        """
        named = name_prompts(prompts)  # an iterable may take its time, or call the engine
        with self._lock:
            self._check_ready()
            checked = self._intake.check_all(named, sampling_params, on_error)
            return self._complete(checked, use_tqdm)

    def _complete(
        self, checked: list[CheckedRequest | Refusal], use_tqdm: bool, pooling: str | None = None
    ) -> list[RequestOutput]:
        """Run checked requests to their end."""
        check_bool("use_tqdm", use_tqdm)
        with self._lock:
            self._check_ready()
            self._check_alone()
            outputs: dict[int, RequestOutput] = {}
            with (
                self.core.reset_on_error(),
                Progress(len(checked), self.core.metrics, use_tqdm) as bar,
            ):
                ids = []
                for item in checked:
                    if isinstance(item, Refusal):
                        output = self._intake.refused(item)
                        outputs[output.request_id] = output
                        ids.append(output.request_id)
                    else:
                        ids.append(self._add(item, pooling))
                bar.update(len(outputs))
                while not self.core.is_idle():
                    self._advance()
                    finished = self._take_finished()
                    outputs.update((output.request_id, output) for output in finished)
                    bar.update(len(finished))
            return [outputs[request_id] for request_id in ids]

    def _check_alone(self) -> None:
        if not self.core.is_idle():
            raise RuntimeError(
                "this call needs an engine without other requests, but some of stream() or "
                "add_request() are left: finish them, or drop them with abort_all()"
            )

    def metrics(self) -> dict[str, Any]:
        """The configuration that took effect, counters and times: they explain a slow run.

        Numbers, strings and dictionaries of them, as JSON has them. See `Metrics` for the
        counters; the times are `Latencies`, each with count, mean, p50, p90, p99 and max (None
        before the first). `kvcache_usage` is the share of the KV blocks that requests hold. With
        data parallelism they are those of all replicas together, and `replicas` has those of each.
        """
        with self._lock:
            self._check_open()
            try:
                described = self.core.describe()
            except BaseException:
                if self.executor.is_broken:  # no replica is left
                    self._close_quietly()
                raise
            return {
                **self._describe(),
                **described,
                "data_parallel_size": self.config.data_parallel_size,
                "weight_version": self.core.weight_version,
                "adapter": self._updates.adapter,
            }

    # -- the end --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            self._refuse()

    def _check_alive(self) -> None:
        """RuntimeError if the engine is closed, or has lost its processes. Takes no lock."""
        self._check_open()
        if (failure := self.executor.failure) is not None:
            raise RuntimeError(str(failure))  # not itself, whose traceback would grow

    def _check_ready(self) -> None:
        """Refuse to compute with an engine that is closed or held."""
        if self.is_closed or self.core.is_held:
            self._refuse()

    def _refuse(self) -> NoReturn:
        closed = "this engine is closed: build a new LLM"
        raise RuntimeError(closed if self.is_closed else self._hold.refusal)

    def exit(self) -> None:
        """Drop all requests and give the memory back, after the calls that other threads have
        begun. May be called again.

        Raises:
            RuntimeError: while weights are written: from an update's iterable, or a signal's
                handler.
        """
        if self._lock.is_forked:  # the device and its workers are the parent's
            return
        with self._lock:
            self._updates.check_idle()
            self.core.reset()
            self._close()

    def _close_quietly(self) -> None:
        """Close after an error, which matters more than one in closing."""
        try:
            self._close()
        except Exception:
            logger.warning("the engine did not shut down cleanly", exc_info=True)

    def __enter__(self) -> Self:
        with self._lock:
            self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()


def _close(executor: AnyExecutor, recorder: Recorder, lock: FairLock) -> None:
    if lock.is_forked:
        return
    try:
        recorder.stop()
    finally:
        executor.close()
    with lock:  # when Python ends, a daemon thread may be in a step: let it run into its error
        pass
