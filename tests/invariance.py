"""The ways in which an engine may come to a token, and the bits that it has for it then."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from checkpoints import outputs_of
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.scheduling.admission import LengthEstimator
from nanovllm.utils.integers import cdiv

DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
# Families whose operations differ, and shapes of theirs for `make_checkpoint`.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "gemma 2": ("gemma2", {"sliding_window": 20, "head_dim": 32}),
    "gemma 3": ("gemma3_text", {"sliding_window": 20, "head_dim": 32, "num_hidden_layers": 6}),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": 20,
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "olmo 2": ("olmo2", {}),
    "qwen3 moe": ("qwen3_moe", EXPERTS),
    "qwen3.5": ("qwen3_5_text", DELTA_NET),
    "qwen3.5 moe": (
        "qwen3_5_moe_text",
        {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "lfm2": (
        "lfm2",
        {
            "conv_L_cache": 3,
            "block_multiple_of": 32,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}
# Tokens, and the log-probabilities of each place: of the completion, and of the prompt.
Bits = tuple[list[int], list[Any]]
Found = list[tuple[int, RequestOutput]]  # outputs, and whose they are


class Workload:
    """Prompts of random tokens, with parameters that want different things.

    Args:
        seed: seed of the tokens.
        lengths: numbers of tokens of the prompts.
        max_tokens: tokens of each completion.
        vocab_size: number of tokens.
        shared: tokens with which all prompts begin.
    """

    def __init__(
        self,
        seed: int,
        lengths: Sequence[int],
        max_tokens: int,
        vocab_size: int = 128,
        shared: int = 0,
    ) -> None:
        print(f"seed {seed}")
        rng = random.Random(seed)
        first = [rng.randrange(vocab_size) for _ in range(shared)]
        rest = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
        self.prompts, self.max_tokens = [first + own for own in rest], max_tokens

    def params(self, i: int, **options: Any) -> SamplingParams:
        """The parameters of the i-th prompt, which wants 0 to 3 of the most likely tokens."""
        own = {"temperature": 0.8, "seed": 100 * i, "logprobs": i % 4} | options
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, **own)

    def all_params(self, **options: Any) -> list[SamplingParams]:
        """The parameters of all prompts."""
        return [self.params(i, **options) for i in range(len(self.prompts))]


def bits(output: RequestOutput, i: int = 0) -> Bits:
    """The tokens and log-probabilities of the i-th completion."""
    completion = output.outputs[i]
    assert completion.logprobs is not None
    return completion.token_ids, [_numbers(place) for place in completion.logprobs]


def prompt_bits(output: RequestOutput) -> list[Any]:
    """The log-probabilities of the prompt."""
    assert output.prompt_logprobs is not None
    return [_numbers(place) for place in output.prompt_logprobs]


def _numbers(place: Any) -> Any:
    return None if place is None else {token: (p.logprob, p.rank) for token, p in place.items()}


class Watch:
    """What an engine's steps were. It looks at all that are chosen while `patch` holds.

    Attributes:
        largest: most sequences of a step.
        chunked: prompts of which a step computed a part.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.largest, self.chunked = 0, set[tuple[int, ...]]()
        schedule = Scheduler.schedule

        def watched(scheduler: Scheduler) -> list[ScheduledSequence]:
            step = schedule(scheduler)
            self.largest = max(self.largest, len(step))
            for item in step:
                if not item.samples:
                    self.chunked.add(tuple(item.seq.token_ids[: item.seq.num_prompt_tokens]))
            return step

        patch.setattr(Scheduler, "schedule", watched)

    def happened(self, way: str, found: Found, largest: int) -> list[bool]:
        """Whether that happened which a way is for, to each request.

        Args:
            way: the way.
            found: outputs, and whose they are.
            largest: number of sequences of the largest step, at least.
        """
        if way == "preempted":
            preempted = {i for i, output in found if was_preempted(output)}
            return [i in preempted for i, _ in found]
        if way == "hits":
            return [output.num_cached_tokens > 0 for _, output in found]
        if way == "chunks":
            return [tuple(output.prompt_token_ids) in self.chunked for _, output in found]
        return [self.largest >= largest]


def was_preempted(output: RequestOutput) -> bool:
    """Whether a request has lost its place."""
    assert output.metrics is not None
    return output.metrics.num_preemptions > 0


def preempt_each(patch: pytest.MonkeyPatch, max_tokens: int = 7) -> None:
    """Let each sequence lose its place once, after any of its first `max_tokens` tokens, as where
    the pool is full.
    """
    schedule = Scheduler.schedule

    def preempting(scheduler: Scheduler) -> list[ScheduledSequence]:
        for seq in [*scheduler.running]:
            if (
                not seq.num_preemptions
                and seq.seq_id % max_tokens < len(seq.token_ids) - seq.num_prompt_tokens
            ):
                scheduler.preempt(seq)
        return schedule(scheduler)

    patch.setattr(Scheduler, "schedule", preempting)


def differences(
    path: Any,
    work: Workload,
    options: dict[str, Any],
    ways: dict[str, dict[str, Any]],
    generate: Callable[[LLM, Any, Any], list[RequestOutput]] = outputs_of,
    each: bool = False,
) -> list[str]:
    """The ways in which any bit differs from that of the same request alone, each with options of
    its own: "batch" (two completions of each prompt), "chunks", "preempted", "hits". What each is
    for happens: to every request if `each`, else to some.
    """
    count = list(range(len(work.prompts)))

    def run(llm: LLM, which: list[int], **own: Any) -> list[RequestOutput]:
        params = [work.params(i, **own) for i in which]
        return generate(llm, [work.prompts[i] for i in which], params)

    with LLM(path, **{**options, **ways["batch"], "enable_prefix_caching": False}) as llm:
        first = [run(llm, [i], prompt_logprobs=2)[0] for i in count]
        seconds = [bits(run(llm, [i], seed=100 * i + 1)[0]) for i in count]
    wanted, of_prompts = [*map(bits, first)], [*map(prompt_bits, first)]
    wrong = []
    for way, given in ways.items():
        own = dict(given)
        more: dict[str, Any] = {} if way == "hits" else {"prompt_logprobs": 2}
        if way == "batch":
            more["n"] = 2
        if way == "preempted":  # room for all prompts and their first tokens
            own = {"enable_prefix_caching": False} | own
            if "num_kvcache_blocks" not in own:
                size = options["kvcache_block_size"]
                own["num_kvcache_blocks"] = sum(cdiv(len(p) + 1, size) for p in work.prompts)
        with LLM(path, **{**options, **own}) as llm, pytest.MonkeyPatch.context() as patch:
            if way == "preempted":
                patch.setattr(LengthEstimator, "remaining", lambda self, seq: 1)
                if each:  # before its last token
                    preempt_each(patch, work.max_tokens - 1)
            watch = Watch(patch)
            for _ in range(2 if way == "hits" else 1):
                found = [*zip(count, run(llm, count, **more), strict=True)]
            largest = min(llm.config.max_num_seqs, 2 * len(count)) if way == "batch" else 2
            happened = watch.happened(way, found, largest)
        assert all(happened) if each else any(happened), f"{way}: it did not happen"
        same = all(bits(output) == wanted[i] for i, output in found)
        if way != "hits":
            same = same and all(prompt_bits(output) == of_prompts[i] for i, output in found)
        if way == "batch":
            same = same and all(bits(output, 1) == seconds[i] for i, output in found)
        if not same:
            wrong.append(way)
    return wrong
