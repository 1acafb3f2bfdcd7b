"""The number of experts that a step touches, with which a mixture's speed is to be compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.experts import Choose, SparseMLP
from nanovllm.utils.context import get_context


class Touched(NamedTuple):
    """Experts of a layer that some tokens choose, in the mean of the layers.

    Attributes:
        num_tokens: number of tokens.
        experts: number of experts that any of them chooses.
        independent: expected number if tokens chose experts independently, all alike.
        total: number of all experts.
    """

    num_tokens: int
    experts: float
    independent: float
    total: int

    def describe(self) -> str:
        """The numbers as a sentence."""
        return (
            f"{self.num_tokens} tokens choose {self.experts:.1f} of {self.total} experts of a "
            f"layer ({self.independent:.1f}, if independently)"
        )


def touched(llm: LLM, prompts: list[list[int]]) -> Touched | None:
    """The experts of a step in which each prompt's sequence has one token: those of its last token.
    None for a dense model, and where other processes compute.
    """
    facts, config = llm.model_config.experts, llm.config
    if facts is None or config.data_parallel_size * config.tensor_parallel_size > 1:
        return None
    layers = [m for m in llm.model_runner.model.modules() if isinstance(m, SparseMLP)]
    chosen: list[list[torch.Tensor]] = [[] for _ in layers]
    llm.reset_prefix_cache()
    with _watched(layers, chosen):
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    if not chosen[0]:
        return None
    of_layers = [torch.cat(each)[: len(prompts), : facts.num_experts_per_tok] for each in chosen]
    num_tokens, total = len(of_layers[0]), facts.num_experts
    counts = [len(each.unique()) for each in of_layers]
    share = facts.num_experts_per_tok / total
    independent = total * (1 - (1 - share) ** num_tokens)
    return Touched(num_tokens, sum(counts) / len(counts), independent, total)


@contextmanager
def _watched(layers: list[SparseMLP], chosen: list[list[torch.Tensor]]) -> Iterator[None]:
    """Append to each layer's list the experts [P, k] of the last tokens of prompts, while the
    context lasts. Steps of few tokens, which replay graphs, are not seen.
    """
    own = [layer.choose for layer in layers]

    def watch(choose: Choose, found: list[torch.Tensor]) -> Choose:
        def watched(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            experts, weights = choose(x)
            rows = get_context().kept_rows
            if rows is not None:
                found.append(experts if len(x) == len(rows) else experts[rows])
            return experts, weights

        return watched

    for layer, choose, found in zip(layers, own, chosen, strict=True):
        layer.choose = watch(choose, found)
    try:
        yield
    finally:
        for layer, choose in zip(layers, own, strict=True):
            layer.choose = choose
