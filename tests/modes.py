"""The modes in which an engine gives the same answers: their list, and an engine in one of them.

A feature has one test over `in_every_mode`, with its own workload and oracle. Whether an engine has
done what its mode is for (chunks, hits, preemptions) is asked here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from checkpoints import SMALL, assert_idle, outputs_of, rare
from nanovllm import LLM
from nanovllm.scheduling.admission import LengthEstimator

# Options beside those of SMALL.
MODES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "chunks": {},
    "chunks-of-7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks-of-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks-beside-decodes": {"max_num_batched_tokens": 9},
    "large-blocks": {"kvcache_block_size": 32, "num_kvcache_blocks": 6, "mixed_steps": False},
    "no-cache": {"max_num_batched_tokens": 24, "enable_prefix_caching": False},
    "prefill-first": {"max_num_batched_tokens": 13, "mixed_steps": False},
    "prefill-first-no-cache": {"mixed_steps": False, "enable_prefix_caching": False},
}
# Admission expects one token of everybody here, so that sequences that grow are preempted.
SMALL_POOLS: dict[str, dict[str, Any]] = {
    "small-pool": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24},
    "small-pool-whole": {"num_kvcache_blocks": 9},
    "small-pool-no-cache": {
        "num_kvcache_blocks": 9,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
    },
    "small-pool-prefill-first": {
        "num_kvcache_blocks": 9,
        "max_num_batched_tokens": 24,
        "mixed_steps": False,
    },
}

SHARED = [(7 * i + 3) % 128 for i in range(40)]  # two blocks and a half
# Prompts of one token, of whole blocks and beside them, with and without a common prefix.
PREFIXED: list[list[int]] = [
    [*SHARED, 9],
    [*SHARED, 9],
    [5],
    [*range(16)],
    SHARED[:32],
    [*SHARED, 1, 2, 3],
    [*range(90, 0, -1)],
    SHARED[:32],
    [1, 2],
    [3, *SHARED[:16]],
    [*SHARED, *range(8)],  # three blocks
    [*SHARED, 9],
]


class Mode(NamedTuple):
    """A mode, synchronous or with overlap."""

    name: str
    overlap: bool

    def __str__(self) -> str:
        return f"{self.name}-overlap" if self.overlap else self.name

    @property
    def options(self) -> dict[str, Any]:
        """All options of the engine."""
        return {**SMALL, **{**MODES, **SMALL_POOLS}[self.name], "overlap": self.overlap}

    @property
    def preempts(self) -> bool:
        return self.name in SMALL_POOLS

    @property
    def caches(self) -> bool:
        return bool(self.options.get("enable_prefix_caching", True))


def in_every_mode(*usual: str, pools: bool = True) -> pytest.MarkDecorator:
    """Run a test with each `mode`.

    Args:
        usual: names of modes of the default run; the others are slow.
        pools: whether small pools are among them: for workloads whose sequences grow.
    """
    names = [*MODES, *SMALL_POOLS] if pools else [*MODES]
    modes = [Mode(name, overlap) for name in names for overlap in (False, True)]
    assert {*map(str, modes)} >= {*usual}, "no such mode"
    cases = [mode if str(mode) in usual else rare(mode) for mode in modes]
    return pytest.mark.parametrize("mode", cases, ids=[*map(str, modes)])


@contextmanager
def engine_in(mode: Mode, path: Any) -> Iterator[LLM]:
    """An engine in a mode. At the end it has nothing left, and has done what the mode is for."""
    with pytest.MonkeyPatch.context() as patch:
        if mode.preempts:
            patch.setattr(LengthEstimator, "remaining", lambda self, seq: 1)
        with LLM(path, **mode.options) as llm:
            yield llm
            assert_idle(llm)
            assert not llm.core.requests
            metrics = llm.metrics()
            assert metrics["overlap"] == mode.overlap
            assert metrics["num_preemptions"] > 0 or not mode.preempts, "the mode is pointless"
            assert metrics["num_cached_tokens"] == 0 or mode.caches


def run_in(mode: Mode, path: Any, prompts: Any, params: Any) -> tuple[list[Any], dict[str, Any]]:
    """`outputs_of` requests, and metrics."""
    with engine_in(mode, path) as llm:
        return outputs_of(llm, prompts, params), llm.metrics()
