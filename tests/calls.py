"""Calls of all kinds to an engine of the embedded checkpoint, and the bits that they give."""

from collections.abc import Iterable
from typing import Any

from checkpoints import SMALL, TINY, outputs_of
from nanovllm import (
    LLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

HEAD = "127+345=472 17-9="  # more than a block
TEXTS = ["4", HEAD, f"{HEAD}8,1"]
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)
OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64, "batch_invariant": True}
# Chunks end within blocks.
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 11, "max_num_seqs": 5}
KINDS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3},
    "greedy": {"temperature": 0.0, "logprobs": 0},
    "several": {"n": 2, "logprobs": 0, "logprobs_mode": "temperature_logprobs"},
    "prompt": {"prompt_logprobs": 2},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    "edits": {"logit_bias": {52: 2.0}, "frequency_penalty": 0.5, "logprobs": 2},
    "labels": {"logprob_token_ids": [52, 7, 48], "logprobs_mode": "processed_logprobs"},
    "mask": {"top_k": 20, "min_p": 0.001, "return_sampling_mask": True, "logprobs": 0},
    "form": {
        "structured_outputs": StructuredOutputsParams(regex="[0-9]{2}(ab|c)+"),
        "ignore_eos": False,
        "logprobs": 2,
    },
}
Request = tuple[Any, SamplingParams]


def requests_of(prompts: Iterable[Any], *leave_out: str) -> list[Request]:
    """A request of each kind for each prompt."""
    common = {"temperature": 1.5, "max_tokens": 5, "ignore_eos": True}
    return [
        (prompt, SamplingParams(**{**common, "seed": 10 * i + j, **own}))
        for i, own in enumerate(own for kind, own in KINDS.items() if kind not in leave_out)
        for j, prompt in enumerate(prompts)
    ]


REQUESTS = requests_of(TEXTS[::2])


def run(llm: LLM, requests: Iterable[Request] = REQUESTS) -> list[RequestOutput]:
    """The outputs of requests."""
    return outputs_of(llm, *zip(*requests, strict=True))


def shown(output: RequestOutput) -> list[Any]:
    """All that an output has of the model's results."""
    places = output.prompt_logprobs
    return [
        None if places is None else list(places),
        *(
            (
                *(each.index, each.text, each.token_ids, each.cumulative_logprob),
                None if each.logprobs is None else list(each.logprobs),
                None if each.sampling_mask is None else list(each.sampling_mask),
            )
            for each in output.outputs
        ),
    ]


def of_texts(llm: LLM, texts: list[str]) -> list[Any]:
    """Scores, vectors and beams of texts."""
    scores = llm.score(texts, use_tqdm=False)
    vectors = [each.outputs.embedding for each in llm.embed(texts, "mean", use_tqdm=False)]
    beams = [
        [(beam.tokens, beam.cum_logprob) for beam in output.sequences]
        for output in llm.beam_search(texts, BEAMS)
    ]
    return [*zip(scores, vectors, beams, strict=True)]


def alone(**options: Any) -> tuple[list[Any], list[Any]]:
    """What `shown` and `of_texts` have of each request and each text, with nothing beside it."""
    own = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, **options}
    with LLM(TINY, **{**OPTIONS, **own}) as llm:
        outputs = [shown(run(llm, [request])[0]) for request in REQUESTS]
        return outputs, [of_texts(llm, [text])[0] for text in TEXTS]
