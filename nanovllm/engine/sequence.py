"""`Sequence`: a request on its way through the engine; `ScheduledSequence`: its part of a step."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import NamedTuple

import xxhash

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.request_controls import RequestControls
from nanovllm.engine.structured_output import Grammar
from nanovllm.outputs import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

NO_LIMIT = 1 << 62
PENDING = -1  # stands for a token that has been sampled but not read back yet


class SequenceStatus(Enum):
    WAITING = auto()  # not started, or preempted
    RUNNING = auto()  # holds KV blocks
    FINISHED = auto()


class Sequence:
    """Tokens of one request, and where their keys and values lie.

    `token_ids` only grows. The first `num_computed_tokens` of them have their keys and values in
    the blocks of `block_table`, or a step that computes them is on its way; the KV of token `i`
    lies in block `block_table[i // block_size]` at offset `i % block_size`. The last `num_pending`
    tokens are `PENDING`: that step samples them, and the device alone knows them so far.
    """

    __slots__ = (
        "arrived_at",
        "block_hashes",
        "block_size",
        "block_table",
        "controls",
        "detokenizer",
        "embedding",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "grammar",
        "index",
        "logprobs",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_dropped_blocks",
        "num_followed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "pooling",
        "prompt_logprobs",
        "random_key",
        "request_id",
        "sampling_params",
        "seq_id",
        "slot",
        "started_at",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        block_size: int,
        seed: int = 0,
        index: int = 0,
        request_id: int = 0,
        controls: RequestControls | None = None,
        grammar: Grammar | None = None,
        detokenizer: Detokenizer | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: TokenLogprobs | None = None,
        pooling: str | None = None,
        completion: list[int] | None = None,
        arrived_at: float | None = None,
    ) -> None:
        assert token_ids, "a sequence has at least one prompt token"
        self.seq_id = seq_id  # grows with arrival
        self.request_id = request_id  # the same for all completions of a prompt
        self.index = index  # of this completion among them
        self.token_ids = [*token_ids, *(completion or ())]  # of one that began elsewhere
        self.num_prompt_tokens = len(token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = sampling_params.max_tokens or NO_LIMIT  # to generate
        self.controls = controls
        self.grammar = grammar  # of structured outputs
        self.num_followed = 0  # tokens of the completion that the grammar knows
        self.detokenizer = detokenizer  # where its text is needed on the way
        self.block_size = block_size
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs  # of the tokens computed so far
        self.pooling = pooling  # of the prompt's hidden states: "last" or "mean"
        self.embedding: list[float] | None = None
        # Seconds of time.perf_counter.
        self.arrived_at = time.perf_counter() if arrived_at is None else arrived_at
        self.started_at = 0.0
        self.first_token_at, self.finished_at = 0.0, 0.0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache served when it started
        self.num_preemptions = 0
        self.num_pending = 0
        self.slot = -1  # while running: its row in what the ranks remember of it
        self.num_sent_blocks = 0  # of the block table, those that the ranks know
        # Two 32-bit words; with a position they determine the noise of a sampled token.
        own_seed = sampling_params.seed
        name = f"{seed} {seq_id}" if own_seed is None else f"request {own_seed + index}"
        key = xxhash.xxh64_intdigest(name.encode())
        self.random_key = (key >> 32, key & 0xFFFFFFFF)
        self.block_table: list[int] = []
        self.num_dropped_blocks = 0  # of its beginning, given back: behind the window
        self.block_hashes: list[int] = []  # of the full blocks, each computed once

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_completion_tokens} tokens, {self.num_computed_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are not pending."""
        return len(self.token_ids) - self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without KV: the rest of the prompt, or the newest token."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its prompt must be computed, whatever is in the prefix cache."""
        given = self.prompt_logprobs
        missing = given is not None and len(given) < self.num_prompt_tokens
        return missing or self.pooling == "mean"

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_blocks(self) -> int:
        """Blocks that all its tokens need."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of its table that it has not given back."""
        return self.block_table[self.num_dropped_blocks :]

    @property
    def last_block_num_tokens(self) -> int:
        return len(self.token_ids) - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """Token ids of block `i`."""
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        """Append a token, or `PENDING` for one that a step on its way samples."""
        self.token_ids.append(token_id)
        self.num_pending += token_id == PENDING

    def resolve_pending(self, token_id: int) -> None:
        """The oldest pending token turned out to be `token_id`."""
        self.token_ids[self.num_known_tokens] = token_id
        self.num_pending -= 1

    def drop_pending(self) -> None:
        """The sequence has ended: forget what steps on their way sample for it."""
        del self.token_ids[self.num_known_tokens :]
        self.num_pending = 0


class ScheduledSequence(NamedTuple):
    """Tokens of a sequence that a step computes. A sequence may have several such items of one
    token each, in the order of the tokens: its decode.

    Attributes:
        seq: the sequence.
        start: position of the first token.
        num_tokens: how many.
        samples: whether they reach the sequence's last token, so that a new one is sampled.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool

    @classmethod
    def of(cls, seq: Sequence, budget: int) -> ScheduledSequence:
        """The uncomputed tokens of `seq`, at most `budget`."""
        rest = seq.num_uncomputed_tokens
        num_tokens = min(rest, budget)
        return cls(seq, seq.num_computed_tokens, num_tokens, num_tokens == rest)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether these are the last tokens, and ones that the sequence generated."""
        return self.num_tokens == 1 and self.start >= self.seq.num_prompt_tokens
