"""Kinds of work, each as an engine does it for the first time and for the second.

`startup.py --first-use` times them in processes of their own, which begin with an empty compile
cache; `KINDS` is also what tests of compiled kernels go through. Prompts are random tokens, others
the second time: nothing comes from the prefix cache.
"""

import gc
import importlib.util
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.sampling_controls import SCHEMA
from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.benchmark import harness

RATIO, SLACK = 1.1, 0.05  # of the second time, and seconds: what the first may take
ALLOWED = [*range(50)]  # token ids


class Size(NamedTuple):
    """Size of the workload.

    Attributes:
        num_seqs: prompts.
        group: prompts of a small group, and the number of such groups.
        prefix: tokens that prompts share; an eighth where each group shares as many more.
        prompt: tokens of each, or after a prefix.
        output: tokens to generate for each.
    """

    num_seqs: int = 256
    group: int = 16
    prefix: int = 2048
    prompt: int = 128
    output: int = 64

    @classmethod
    def of(cls, num_seqs: int) -> "Size":
        """Sizes in proportion: a small workload has small groups and short prefixes, too."""
        return cls(num_seqs, math.isqrt(num_seqs), 8 * num_seqs)


class UnavailableError(Exception):
    """The engine, or this machine, cannot do a kind of work; says why."""


class Job:
    """Work for an engine, of prompts that nothing else has."""

    def __init__(self, llm: LLM, rng: random.Random, size: Size) -> None:
        self.llm, self.size, self._rng = llm, size, rng
        self._vocab_size = min(10000, llm.model_config.vocab_size)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def prompts(
        self, count: int | None = None, length: int | None = None, prefix: Sequence[int] = ()
    ) -> list[list[int]]:
        """Prompts that begin with a prefix."""
        count, length = count or self.size.num_seqs, length or self.size.prompt
        return [[*prefix, *self.tokens(length)] for _ in range(count)]

    def params(self, **others: Any) -> SamplingParams:
        """The common parameters, with others."""
        common = {"temperature": 0.6, "ignore_eos": True, "max_tokens": self.size.output}
        return SamplingParams(**{**common, **others})

    def generate(self, prompts: list[list[int]], **others: Any) -> Callable[[], object]:
        """Complete prompts with these parameters."""
        return partial(self.llm.generate, prompts, self.params(**others), use_tqdm=False)

    def needs_tokenizer(self) -> None:
        """Raise `UnavailableError` without one."""
        if self.llm.get_tokenizer() is None:
            raise UnavailableError("the checkpoint has no tokenizer")


def arriving(job: Job) -> Callable[[], object]:
    """Half of the prompts come while the other half is decoded."""
    half, params, llm = max(1, job.size.num_seqs // 2), job.params(), job.llm
    first, second = job.prompts(half), job.prompts(half)

    def work() -> None:
        for batch in (first, second):
            for prompt in batch:
                llm.add_request(prompt, params)
            for _ in range(8):
                llm.step()
        while not llm.is_finished():
            llm.step()

    return work


def groups(job: Job) -> Callable[[], object]:
    """Each group of prompts shares a prefix after a short one of all."""
    short = job.tokens(job.size.prefix // 8)
    prefixes = [[*short, *job.tokens(len(short))] for _ in range(job.size.group)]
    prompts = [
        prompt for prefix in prefixes for prompt in job.prompts(job.size.group, prefix=prefix)
    ]
    return job.generate(prompts)


def one_of_many(job: Job) -> Callable[[], object]:
    """One prompt has controls, the others have none."""
    params = [job.params(top_k=50, top_p=0.9), *[job.params()] * (job.size.num_seqs - 1)]
    return partial(job.llm.generate, job.prompts(), params, use_tqdm=False)


def bad_words(job: Job) -> Callable[[], object]:
    """Words that are not generated, of one token or several."""
    job.needs_tokenizer()
    return job.generate(job.prompts(), bad_words=["ab", "the end", "42"])


def structured(job: Job) -> Callable[[], object]:
    """JSON of a schema."""
    job.needs_tokenizer()
    if importlib.util.find_spec("llguidance") is None:
        raise UnavailableError("llguidance is not installed")
    form = StructuredOutputsParams(json=SCHEMA)
    return job.generate(job.prompts(), structured_outputs=form)


def long_prompts(job: Job) -> Callable[[], object]:
    """Two prompts that are computed in chunks."""
    budget, most = job.llm.config.max_num_batched_tokens, job.llm.max_model_len - job.size.output
    if most <= budget:
        raise UnavailableError(
            f"a prompt of max_model_len {job.llm.max_model_len} fits a step of "
            f"max_num_batched_tokens {budget}"
        )
    return job.generate(job.prompts(2, min(most, 2 * budget)))


def beams(job: Job) -> Callable[[], object]:
    """A beam search, which needs log-probabilities of other tokens at each step."""
    params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    return partial(job.llm.beam_search, job.prompts(job.size.group), params)


def controlled(**controls: Any) -> Callable[[Job], Callable[[], object]]:
    """All prompts with these controls."""
    return lambda job: job.generate(job.prompts(), **controls)


KINDS: dict[str, Callable[[Job], Callable[[], object]]] = {
    "plain": controlled(),
    "one prompt": lambda job: job.generate(job.prompts(1)),
    "greedy": controlled(temperature=0.0),
    "arriving prompts": arriving,
    "long prompts": long_prompts,
    "prefix of all prompts": lambda job: job.generate(
        job.prompts(prefix=job.tokens(job.size.prefix))
    ),
    "prefix of a group": lambda job: job.generate(
        job.prompts(job.size.group, prefix=job.tokens(job.size.prefix))
    ),
    "prefixes of groups": groups,
    "samples of prompts": lambda job: job.generate(job.prompts(job.size.group), n=job.size.group),
    "top_k and top_p": controlled(top_k=50, top_p=0.9),
    "top_k": controlled(top_k=50),
    "top_p": controlled(top_p=0.9),
    "top_k and top_p of one prompt": one_of_many,
    "min_p and penalties": controlled(min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    "repetition_penalty": controlled(repetition_penalty=1.1),
    "logit_bias": controlled(logit_bias={7: 2.0, 11: -3.0}),
    "allowed_token_ids": controlled(allowed_token_ids=ALLOWED),
    "min_tokens": lambda job: job.generate(
        job.prompts(), ignore_eos=False, min_tokens=job.size.output
    ),
    "bad_words": bad_words,
    "structured output": structured,
    "log-probabilities": controlled(logprobs=0),
    "log-probabilities of 5 more": controlled(logprobs=5),
    "log-probabilities of 20 more": controlled(logprobs=20),
    "log-probabilities at temperature": controlled(
        logprobs=0, logprobs_mode="temperature_logprobs"
    ),
    "log-probabilities of what is drawn from": controlled(
        logprobs=5, top_p=0.9, logprobs_mode="processed_logprobs"
    ),
    "sampling masks": controlled(top_k=50, return_sampling_mask=True),
    "labels": controlled(logprob_token_ids=[3, 4]),
    "all controls": controlled(
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        logit_bias={7: 2.0},
        allowed_token_ids=ALLOWED,
        logprobs=5,
    ),
    "prompt log-probabilities": lambda job: job.generate(
        job.prompts(job.size.group), prompt_logprobs=5
    ),
    "scores": lambda job: partial(job.llm.score, job.prompts(job.size.group), use_tqdm=False),
    "beam search": beams,
    "embeddings": lambda job: partial(job.llm.embed, job.prompts(), use_tqdm=False),
    "embeddings, mean": lambda job: partial(
        job.llm.embed, job.prompts(), pooling="mean", use_tqdm=False
    ),
}


class Compilations:
    """Kernels that Triton has compiled in this process, and those that it has found in its cache:
    of an earlier process, or of one that compiles for this. A listener that was there goes on.

    Attributes:
        compiled, found: names of their functions.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.found: list[str] = []

    def listen(self) -> None:
        """Hear of all kernels from now on. Nothing is heard without Triton."""
        if importlib.util.find_spec("triton") is None:
            return
        from triton import knobs

        before = knobs.compilation.listener

        def hear(*, src: Any, cache_hit: bool, **others: Any) -> None:
            (self.found if cache_hit else self.compiled).append(src.name)
            if before is not None:
                before(src=src, cache_hit=cache_hit, **others)

        knobs.compilation.listener = hear

    def take(self) -> dict[str, list[str]]:
        """Kernels since the last call, by name."""
        taken = {"compiled": sorted(self.compiled), "found": sorted(self.found)}
        self.compiled, self.found = [], []
        return taken


def settle(llm: LLM) -> None:
    """Wait until no kernel is compiled in the background."""
    runner = getattr(llm, "model_runner", None)  # replicas have theirs elsewhere
    compiler = None if runner is None else runner.built.compiler
    if compiler is not None:
        compiler.wait_for_all()


@contextmanager
def collector_pauses() -> Iterator[list[float]]:
    """Seconds of each pause by Python's collector of garbage, which comes in whatever is running
    when enough objects have been made.
    """
    pauses: list[float] = []
    began = 0.0

    def hear(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(hear)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(hear)


def timed(work: Callable[[], object], kernels: Compilations) -> dict[str, Any]:
    """Seconds of work, those of them for which the collector paused it, and the kernels that it
    needed.
    """
    kernels.take()
    with collector_pauses() as pauses:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "collector": sum(pauses), **kernels.take()}


def measure(
    llm: LLM, name: str, size: Size, kernels: Compilations, *, settles: bool = True
) -> dict[str, Any]:
    """A kind of work for the first time and for the second.

    Args:
        llm: engine that has not done it yet.
        name: key of `KINDS`.
        size: size of the workload.
        kernels: counter of kernels.
        settles: wait for kernels that compile in the background before the second.

    Returns:
        `first` and `second`, as `timed` has them, and whether the first is as quick as it should
        be, both without the collector's pauses; or why it was left out.
    """
    first, second = (random.Random(f"{name}, {turn}") for turn in ("first", "second"))
    try:
        times = {"first": timed(KINDS[name](Job(llm, first, size)), kernels)}
    except UnavailableError as reason:
        return {"left_out": str(reason)}
    if settles:
        settle(llm)
    times["second"] = timed(KINDS[name](Job(llm, second, size)), kernels)
    working, again = (each["seconds"] - each["collector"] for each in times.values())
    allowed = RATIO * again + SLACK
    return {**times, "allowed": allowed, "is_quick": working <= allowed}


def run(model: str, options: dict[str, Any], names: list[str], size: Size, settles: str) -> None:
    """Build an engine, do these kinds of work, and print a line of JSON after each: its name and
    result. The last is the engine's conditions.

    Args:
        model, options: arguments of `LLM`.
        names: keys of `KINDS`.
        size: size of each workload.
        settles: moment to wait for kernels that compile in the background: before the "second"
            time, at the "start", before all of them, or "never".
    """
    kernels, built = Compilations(), []
    kernels.listen()
    start = timed(lambda: built.append(LLM(model, **options)), kernels)
    [llm] = built
    print(json.dumps(["LLM(...)", {"first": start}]), flush=True)
    if settles == "start":
        settle(llm)
    for name in names:
        result = measure(llm, name, size, kernels, settles=settles == "second")
        print(json.dumps([name, result]), flush=True)
    print(json.dumps(["conditions", harness.conditions(llm)]), flush=True)
    llm.exit()
