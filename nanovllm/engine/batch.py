"""Lays a scheduled step out as flat arrays for the model. numpy only: knows no device.

Letters: T tokens of the step, B sequences, P those of them that prefill, W width of the block
tables, S block size.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.scheduler import ScheduledSequence

Int32 = NDArray[np.int32]


class Batch(NamedTuple):
    """The arrays of `nanovllm.utils.context.Context`, and what goes into the model.

    Rows are ordered: decodes (one token each) first, then the prefilling sequences' tokens.
    """

    num_decodes: int
    input_ids: Int32  # [T], -1 where a decode's token is known to the device only
    positions: Int32  # [T]
    slot_mapping: Int32  # [T]
    context_lens: Int32  # [B]
    block_tables: Int32  # [B, W], zeros past a sequence's blocks
    cu_seqlens_q: Int32  # [P + 1]
    cu_seqlens_k: Int32  # [P + 1]
    slots: Int32  # [B], the sequences' rows in the device's table of last tokens
    samples: NDArray[np.bool_]  # [B], whether the sequence's next token is sampled
    sample_rows: Int32  # [n], rows of [T] of those n sequences
    temperatures: NDArray[np.float32]  # [B]
    random_keys: Int32  # [2, B], two words for each sequence (uint32 in the bits of int32)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one token, and samples the next."""
        return self.num_decodes == len(self.context_lens) == len(self.sample_rows)


def build_batch(scheduled: list[ScheduledSequence], block_size: int) -> Batch:
    """Arrays for `scheduled`, in which the decodes come first (as `Scheduler.schedule` returns)."""
    seqs = [item.seq for item in scheduled]
    counts = np.array([item.num_tokens for item in scheduled])  # [B]
    starts = np.array([item.start for item in scheduled])
    samples = np.array([item.samples for item in scheduled])
    is_prefill = counts > 1
    num_decodes = int(is_prefill.argmax()) if is_prefill.any() else len(seqs)
    ends = np.cumsum(counts)  # [B], row after each sequence's last

    tokens = chain.from_iterable(
        seq.token_ids[start : start + num_tokens] for seq, start, num_tokens, _ in scheduled
    )
    input_ids = np.fromiter(tokens, dtype=np.int32, count=int(ends[-1]))
    rows = np.repeat(np.arange(len(seqs)), counts)  # [T], the sequence of each token
    positions = np.arange(len(rows)) - np.repeat(ends - counts - starts, counts)
    block_tables = _block_tables([seq.block_table for seq in seqs])
    slots = block_tables[rows, positions // block_size] * block_size + positions % block_size
    context_lens = starts + counts
    return Batch(
        num_decodes=num_decodes,
        input_ids=input_ids,
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables,
        cu_seqlens_q=_running_sum(counts[num_decodes:]),
        cu_seqlens_k=_running_sum(context_lens[num_decodes:]),
        slots=np.array([seq.slot for seq in seqs], np.int32),
        samples=samples,
        sample_rows=(ends[samples] - 1).astype(np.int32),
        temperatures=np.array([seq.sampling_params.temperature for seq in seqs], np.float32),
        random_keys=np.array([seq.random_key for seq in seqs], np.uint32).T.view(np.int32),
    )


def warmup_batch(num_seqs: int, num_tokens: int, max_model_len: int, block_size: int) -> Batch:
    """The largest prefill: `num_tokens` in `num_seqs` sequences that all sample.

    Nothing is stored (slots are -1), and every block table points at block 0 only.
    """
    lens = np.full(num_seqs, num_tokens // num_seqs)
    lens[: num_tokens % num_seqs] += 1
    lens = np.minimum(lens, max_model_len)
    T = int(lens.sum())
    return Batch(
        num_decodes=0,
        input_ids=np.zeros(T, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lens]),
        slot_mapping=np.full(T, -1, np.int32),
        context_lens=lens.astype(np.int32),
        block_tables=np.zeros((num_seqs, -(-int(lens.max()) // block_size)), np.int32),
        cu_seqlens_q=_running_sum(lens),
        cu_seqlens_k=_running_sum(lens),
        slots=np.arange(num_seqs, dtype=np.int32),
        samples=np.ones(num_seqs, np.bool_),
        sample_rows=(np.cumsum(lens) - 1).astype(np.int32),
        temperatures=np.ones(num_seqs, np.float32),
        random_keys=np.zeros((2, num_seqs), np.int32),
    )


def _running_sum(lens: NDArray[np.int64]) -> Int32:
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    return out


def _block_tables(tables: list[list[int]]) -> Int32:
    lens = np.array([len(table) for table in tables])
    out = np.zeros((len(tables), int(lens.max())), np.int32)
    blocks = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lens.sum()))
    out[np.arange(out.shape[1]) < lens[:, None]] = blocks
    return out
