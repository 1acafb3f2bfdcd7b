"""`SnapshotBlockManager`: a prefix cache for models with states. No tensors here.

A prefix in the cache is of use where its KV *and* the state after it are there. A state is worth
the KV of hundreds to thousands of tokens, so it is not kept at each block, but where another
sequence needs it: where a waiting sequence's tokens leave those of one that runs, or those whose KV
is in the cache. The one that runs ends a chunk of its prompt there, and its state is copied to a
row of its own: a *snapshot*.

A snapshot belongs to the chain of tokens that ends there, and goes with its block, or before it:
the one that was used least recently, when another needs the row.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import ScheduledSequence, Sequence

# Tokens of which a snapshot's position is a multiple. With the chunks of the delta rule, a prompt
# from a snapshot on is computed as it is from its beginning.
UNIT = 64
DISTANCE = 512  # tokens between snapshots of a prompt: each ends a step early
LOOK_AHEAD = 32  # waiting sequences for which snapshots are taken and kept


@dataclass(eq=False, slots=True)
class Holder:
    """A sequence that holds blocks.

    Attributes:
        seq: the sequence.
        stops: positions at which a snapshot of its state is wanted, also those that it has passed,
            with a snapshot or without: if no row was free, or a decode computed the last token of
            its prompt.
        saved_at: position of the snapshot that a step on its way takes; 0: there is none.
    """

    seq: Sequence
    stops: set[int] = field(default_factory=set)
    saved_at: int = 0

    @property
    def positions(self) -> set[int]:
        """The positions of snapshots that are to come."""
        ahead = {stop for stop in self.stops if stop > self.seq.num_computed_tokens}
        return ahead | {self.saved_at} if self.saved_at else ahead


class SnapshotBlockManager(BlockManager):
    """Blocks with a prefix cache, and the rows of snapshots.

    Args:
        rows: rows of the states that are for snapshots; none: prefixes are not cached.
        unit: number of tokens of which positions of snapshots are multiples, beside a block's.
        distance: minimum number of tokens between snapshots of a prompt.

    Attributes:
        snapshots: rows by the `Block.chain_id` of the last block before them, the least recently
            used first.
        num_snapshots, num_snapshot_hits: number of snapshots that were kept, and of sequences that
            began at one.
        num_snapshot_tokens: number of tokens that these did not compute.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rows: range,
        unit: int = UNIT,
        distance: int = DISTANCE,
    ) -> None:
        self.rows, self.unit = rows, math.lcm(unit, block_size)
        self.distance = distance
        self._blocks_of_unit = self.unit // block_size
        self.num_snapshots = self.num_snapshot_hits = self.num_snapshot_tokens = 0
        super().__init__(num_blocks, block_size, enable_prefix_caching=len(rows) > 0)

    def reset(self) -> None:
        super().reset()
        self._free_rows = list(reversed(self.rows))
        self.snapshots: OrderedDict[int, int] = OrderedDict()
        self._saving: dict[int, int] = {}  # sequence ids, by rows that steps on their way write
        # By sequence id; and those of them that will leave snapshots.
        self._holders: dict[int, Holder] = {}
        self._leaving: dict[int, Holder] = {}
        self._needed: set[int] = set()  # chain ids of snapshots that the first waiting begin at
        self._known: tuple[Sequence | None, int] = None, 0  # of the last look into the cache

    # -- prefix cache ---------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The published blocks that hold the longest known prefix of `seq` with a snapshot."""
        hits = super().find_prefix(seq)
        self._known = seq, len(hits)
        while hits and hits[-1].chain_id not in self.snapshots:
            hits.pop()
        return hits

    def _num_known(self, seq: Sequence) -> int:
        """The number of published blocks that hold the longest known prefix of `seq`, with or
        without a snapshot. Most often `find_prefix` has just been asked.
        """
        last, count = self._known
        return count if last is seq else len(super().find_prefix(seq))

    def postpones(self, seq: Sequence, hits: list[Block]) -> bool:
        """Whether a running sequence leaves a snapshot, further on than the `hits`, that `seq` can
        begin at. One that computes what they share is asked for it.
        """
        self._stop_at_junction(seq, hits)
        return self._will_leave(seq, len(hits))

    def _stop_at_junction(self, seq: Sequence, hits: list[Block]) -> None:
        """Have a snapshot taken where the tokens of a waiting sequence leave those that a running
        one computes, if that is further on than the hits.
        """
        stop, owner = self._next_junction(seq)
        if owner is not None and stop > len(hits) * self.block_size:
            self._stop(owner, stop)

    def _stop(self, holder: Holder, position: int) -> None:
        """Have a snapshot taken of the state of a sequence at a position, if none is near it."""
        if all(abs(position - other) >= self.distance for other in holder.stops):
            holder.stops.add(position)
            self._leaving[holder.seq.seq_id] = holder

    def _next_junction(self, seq: Sequence) -> tuple[int, Holder | None]:
        """The position at which the tokens of a waiting sequence leave those that a running one
        computes, or a bit before it; and the one that runs, if it has not passed the place.
        """
        known = end = self._num_known(seq)
        most, hashes = self._max_shared_blocks(seq), seq.kv.hashes
        owner = None if end == most else self._computing.get(hashes[end])
        while end < most and owner is not None and self._computing.get(hashes[end]) == owner:
            end += 1
        end -= end % self._blocks_of_unit
        if owner is None or end <= known - known % self._blocks_of_unit:
            return 0, None
        other = self._holders[owner]
        stop = end * self.block_size
        return (stop, other) if stop > other.seq.num_computed_tokens else (0, None)

    def _will_leave(self, seq: Sequence, num_hits: int) -> bool:
        """Whether a running sequence will leave a snapshot, or a step on its way takes one, further
        on than the hits, that `seq` can begin at.
        """
        most, hashes = self._max_shared_blocks(seq), seq.kv.hashes
        for other in self._leaving.values():
            for position in other.positions:
                last = position // self.block_size - 1
                if num_hits <= last < most and other.seq.kv.hashes[last] == hashes[last]:
                    return True
        return False

    def _share_prefix(self, seq: Sequence, hits: list[Block]) -> None:
        kv = seq.kv
        self._holders[seq.seq_id] = holder = Holder(seq)
        # The next one that comes so far begins at a snapshot.
        known = self._num_known(seq)
        stop = known - known % self._blocks_of_unit
        if stop > len(hits):
            self._stop(holder, stop * self.block_size)
        if hits:
            chain_id = hits[-1].chain_id
            kv.row = self.snapshots[chain_id]
            self.snapshots.move_to_end(chain_id)
            self.num_snapshot_hits += 1
            self.num_snapshot_tokens += len(hits) * self.block_size
        super()._share_prefix(seq, hits)

    def deallocate(self, seq: Sequence) -> None:
        super().deallocate(seq)
        self._holders.pop(seq.seq_id, None)
        self._leaving.pop(seq.seq_id, None)
        seq.kv.row = 0

    def _forget(self, block: Block) -> None:
        super()._forget(block)
        row = self.snapshots.pop(block.chain_id, None)
        if row is not None:
            self._free_rows.append(row)

    # -- snapshots ------------------------------------------------------------------------------

    def cut(
        self, scheduled: list[ScheduledSequence], waiting: Iterable[Sequence]
    ) -> list[ScheduledSequence]:
        """These items, or their tokens up to where a snapshot is wanted by one of the first that
        wait; with a row for that.
        """
        self._needed.clear()
        for seq in islice(waiting, LOOK_AHEAD if scheduled else 0):
            hits = self.find_prefix(seq)
            if hits:
                self._needed.add(hits[-1].chain_id)
            self._stop_at_junction(seq, hits)
        self._known = None, 0
        return [self._cut(item) for item in scheduled]

    def _cut(self, item: ScheduledSequence) -> ScheduledSequence:
        holder = self._holders[item.seq.seq_id]
        stop = min((s for s in holder.stops if item.start < s <= item.end), default=0)
        if not stop:
            return item
        if not (row := self._take_row()):
            return item
        self._saving[row], holder.saved_at = item.seq.seq_id, stop
        samples = item.samples and stop == item.end
        return item._replace(num_tokens=stop - item.start, samples=samples, save=row)

    def _take_row(self) -> int:
        """A row for a snapshot, that of the least recently used one if none is free; 0: all are
        needed, or steps on their way write them.
        """
        if self._free_rows:
            return self._free_rows.pop()
        for chain_id in self.snapshots:
            if chain_id not in self._needed:
                return self.snapshots.pop(chain_id)
        return 0

    def booked(self, item: ScheduledSequence) -> None:
        del self._saving[item.save]
        seq, end = item.seq, item.end
        self._has_left(self._holders[seq.seq_id])
        chain_id = self.blocks[seq.kv.table[end // self.block_size - 1]].chain_id
        if chain_id in self.snapshots:
            self._free_rows.append(item.save)
        else:
            self.snapshots[chain_id] = item.save
            self.num_snapshots += 1

    def dropped(self, item: ScheduledSequence) -> None:
        del self._saving[item.save]
        self._free_rows.append(item.save)

    def drop_all_saves(self) -> None:
        for row, seq_id in self._saving.items():
            self._free_rows.append(row)
            if seq_id in self._holders:
                self._has_left(self._holders[seq_id])
        self._saving.clear()

    def _has_left(self, holder: Holder) -> None:
        """The step that takes a snapshot of a sequence is on its way no more."""
        holder.saved_at = 0
        if not holder.positions:
            self._leaving.pop(holder.seq.seq_id, None)

    def describe(self) -> dict[str, int]:
        return {
            "num_snapshots": self.num_snapshots,
            "num_snapshot_hits": self.num_snapshot_hits,
            "num_snapshot_tokens": self.num_snapshot_tokens,
        }
