"""`Sequence`: a request on its way through the engine; `ScheduledSequence`: its part of a step;
`InFlightStep`: a step that the device computes, until its tokens are booked.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

from nanovllm.outputs import TokenLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.token_sets import TokenSets

if TYPE_CHECKING:
    from nanovllm.images.image import PlacedImage
    from nanovllm.images.stored import ImageState
    from nanovllm.requests.detokenizer import Detokenizer
    from nanovllm.sampling.request_controls import RequestControls
    from nanovllm.sampling.structured_output import Grammar

NO_LIMIT = 1 << 62
PENDING = -1  # stands for a token that has been sampled but not read back yet


class SequenceStatus(Enum):
    WAITING = auto()  # not started, or preempted
    RUNNING = auto()  # holds KV blocks
    FINISHED = auto()


@dataclass(slots=True)
class KVBlocks:
    """The KV blocks of a sequence, which the block manager alone writes.

    Attributes:
        table: ids of its blocks.
        window_table: ids of those for layers that slide over a window, where others see all tokens.
        num_dropped: number of blocks at the beginning that it has given back, of those for layers
            that slide: older than the window.
        hashes: hashes of its full blocks, each computed once.
        version: number of times that a table has grown.
        row: row of a snapshot that its state begins with, where the model keeps states; 0: none.
    """

    table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    num_dropped: int = 0
    hashes: list[int] = field(default_factory=list)
    version: int = 0
    row: int = 0


class Sent(NamedTuple):
    """The ranks' knowledge of a sequence's blocks.

    Attributes:
        version: version of the tables.
        table, window_table: numbers of blocks.
    """

    version: int = 0
    table: int = 0
    window_table: int = 0


@dataclass(slots=True)
class Results:
    """The results of a sequence beside its tokens, which `ExtraResults` writes.

    Attributes:
        logprobs: log-probabilities of its completion; None: not asked for.
        prompt_logprobs: log-probabilities of prompt tokens computed so far; None: not asked for.
        embedding: pooled hidden states of its prompt; None: not asked for, or not computed.
        has_nan: whether a result is NaN, which ends the sequence.
        sampling_mask: tokens that its completion could have had; None: not asked for.
    """

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    embedding: list[float] | None = None
    has_nan: bool = False
    sampling_mask: TokenSets | None = None


class End(NamedTuple):
    """The end of a sequence.

    Attributes:
        finish_reason: "stop", "length" or "error".
        stop_reason: stop token or string that ended it; None: another reason.
        error: cause of "error".
        is_by_token: whether its last token ended it, which is no text then.
    """

    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    is_by_token: bool = False


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """Tokens of one request, and where their keys and values lie.

    `token_ids` only grows. The first `num_computed_tokens` of them have their keys and values in
    the blocks of `block_table`, or a step that computes them is on its way; the KV of token `i`
    lies in block `block_table[i // block_size]` at offset `i % block_size`. The last `num_pending`
    tokens are `PENDING`: that step samples them, and the device alone knows them so far.

    The scheduler alone writes it, but for the values of others: `kv`, `results`, `sent`, `grammar`,
    `detokenizer` and `image_state`. Times are seconds of time.perf_counter.
    """

    seq_id: int  # grows with arrival
    token_ids: list[int]  # the caller gives those of the prompt
    sampling_params: SamplingParams
    _: KW_ONLY
    block_size: int
    request_id: int = 0  # the same for all completions of a prompt
    index: int = 0  # of this completion among them
    controls: RequestControls | None = None
    grammar: Grammar | None = None  # of structured outputs
    detokenizer: Detokenizer | None = None  # where its text is needed on the way
    results: Results = field(default_factory=Results)
    pooling: str | None = None  # of the prompt's hidden states: "last" or "mean"
    images: tuple[PlacedImage, ...] = ()  # of the prompt, in order
    arrived_at: float = field(default_factory=time.perf_counter)
    seed: InitVar[int] = 0  # the engine's
    completion: InitVar[Collection[int]] = ()  # of one that began elsewhere

    num_prompt_tokens: int = field(init=False)
    images_end: int = field(init=False)  # the index after the last placeholder; 0 without images
    max_tokens: int = field(init=False)  # to generate
    random_key: tuple[int, int] = field(
        init=False
    )  # with a position, a token's noise; 32 bits each
    status: SequenceStatus = SequenceStatus.WAITING
    end: End | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served when it started
    num_pending: int = 0
    num_preemptions: int = 0
    slot: int = -1  # while running: its row in what the ranks remember of it, from 1 on
    position_delta: int = 0  # position of a token after the prompt, less its index
    image_state: ImageState | None = None  # of a sequence with images, in the queue
    sent: Sent = field(default_factory=Sent)
    kv: KVBlocks = field(default_factory=KVBlocks)

    def __post_init__(self, seed: int, completion: Collection[int]) -> None:
        assert self.token_ids, "a sequence has at least one prompt token"
        self.num_prompt_tokens = len(self.token_ids)
        self.images_end = self.images[-1].end if self.images else 0
        self.token_ids = [*self.token_ids, *completion]
        params = self.sampling_params
        self.max_tokens = params.max_tokens or NO_LIMIT
        name = f"{seed} {self.seq_id}"
        if params.seed is not None:
            name = f"request {params.seed + self.index}"
        key = xxhash.xxh64_intdigest(name.encode())
        self.random_key = (key >> 32, key & 0xFFFFFFFF)

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
        given = self.results.prompt_logprobs
        missing = given is not None and len(given) < self.num_prompt_tokens
        return missing or self.pooling == "mean"

    def forget_prompt_logprobs(self) -> None:
        """Forget those of a part of the prompt; the others will be of other weights."""
        given = self.results.prompt_logprobs
        if given is not None and len(given) < self.num_prompt_tokens:
            given.clear()
            given.append_nothing()

    @property
    def finish_reason(self) -> str | None:
        """The reason of its end; None before that."""
        return None if self.end is None else self.end.finish_reason

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
    def block_table(self) -> list[int]:
        """Ids of its blocks."""
        return self.kv.table

    def block(self, i: int) -> list[int]:
        """Token ids of block `i`. Those of placeholders are the stand-ins of their images, which
        tell one image from another.
        """
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        begin, end = i * self.block_size, (i + 1) * self.block_size
        token_ids = self.token_ids[begin:end]
        if begin < self.images_end:
            assert self.image_state is not None, f"{self!r} is not in the queue"
            for placed, stand_in in zip(self.images, self.image_state.stand_ins, strict=True):
                first, last = max(begin, placed.offset), min(end, placed.end)
                if first < last:
                    token_ids[first - begin : last - begin] = [stand_in] * (last - first)
        return token_ids

    def cuts_an_image(self, position: int) -> bool:
        """Whether tokens that see each other lie before this index and after it."""
        if position >= self.images_end or self.image_state is None:
            return False
        return self.image_state.are_whole and any(
            placed.offset < position < placed.end for placed in self.images
        )

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
        num_tokens: number of tokens.
        samples: whether they reach the sequence's last token, so that a new one is sampled.
        save: row that takes a snapshot of the state after them; 0: none is taken.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    save: int = 0

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


class Pending(Protocol):
    """Sampled tokens on their way to the host: `PendingTokens`.

    Attributes:
        extras: results that come with them.
    """

    extras: Any

    def wait(self) -> list[int]: ...
    def device_seconds(self) -> tuple[float, float] | None: ...
    def encoding_seconds(self) -> float | None: ...


class Encoded(NamedTuple):
    """The images that a step encoded.

    Attributes:
        num_images: number of them.
        since, until: times when that was launched, in seconds of time.perf_counter.
    """

    num_images: int
    since: float
    until: float


NO_IMAGES = Encoded(0, 0.0, 0.0)


class InFlightStep(NamedTuple):
    """A step that has been launched and not been booked yet.

    Attributes:
        scheduled: the step.
        tokens: its sampled tokens, and results with them.
        launched_at: seconds of time.perf_counter.
        noted: notes of a `Timeline` on its launch; None without one.
    """

    scheduled: list[ScheduledSequence]
    tokens: Pending
    launched_at: float
    noted: Any = None

    def sampled(self) -> list[Sequence]:
        """The sequences that get its tokens, in their order."""
        return [item.seq for item in self.scheduled if item.samples]
