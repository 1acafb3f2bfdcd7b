"""The scheduler with images, and the books of the store of embeddings. No torch."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from host import make_scheduler, make_seq
from invariants import check_scheduler

from nanovllm.engine.plan import SlotTable, build_batch, mark_sent, plan_step
from nanovllm.engine.sequence import ScheduledSequence, Sequence
from nanovllm.images.image import Image, PlacedImage
from nanovllm.images.positions import three_positions
from nanovllm.scheduling.admission import LengthEstimator
from nanovllm.scheduling.encoder_cache import EncoderCache, ImageFacts, encoding_of
from nanovllm.windows.pages import BlockKind

PAD, MERGE = 999, 2
CAPACITY = 24
WHOLE = BlockKind(0)
KINDS: dict[str, Any] = {
    "all tokens": {},
    "windows": {"kinds": (BlockKind(window=0, pages=1), BlockKind(window=9, pages=1))},
    "states": {"num_snapshots": 4},
}


def make_image(rng: random.Random, which: int) -> Image:
    """One of some images: the same number has the same pixels."""
    rows, columns = [(1, 1), (2, 3), (3, 2), (1, 8), (4, 4), (4, 6)][which % 6]
    pixels = np.full((rows * MERGE, columns * MERGE, 3), which, np.uint8)
    return Image.of(pixels, 1, rows * columns)


def make_prompt(rng: random.Random) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Text and images, in any order; often the beginning is that of others."""
    tokens: list[int] = [1, 2, 3][: rng.randint(0, 3)]
    images = []
    for _ in range(rng.randint(0, 3)):
        image = make_image(rng, rng.randrange(12))
        images.append(PlacedImage(len(tokens), image))
        tokens += [PAD] * image.num_tokens
        tokens += [rng.randint(4, 5) for _ in range(rng.randint(0, 4))]
    return tokens or [7], tuple(images)


class Store:
    """What rows of the store hold, as the device would write and read it."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[bytes, int]] = {}
        self.num_encoded = 0

    def encode(self, scheduled: Any) -> None:
        found = encoding_of(scheduled)
        if found is None:
            return
        assert sum(len(rows) for rows in found.rows) <= CAPACITY, "the budget of a step"
        assert len({pixels.tobytes() for pixels in found.pixels}) == len(found.pixels), "twice"
        for pixels, rows in zip(found.pixels, found.rows, strict=True):
            key = Image.of(pixels, 1, len(rows)).key
            self.rows |= {row: (key, i) for i, row in enumerate(rows.tolist())}
        self.num_encoded += len(found.pixels)


def check_step(store: Store, scheduled: Any, table: SlotTable, three_axes: bool) -> None:
    """Each placeholder of a step gets its row of its image, and each token its positions."""
    plan = plan_step(scheduled)
    table.update(plan)
    batch = build_batch(plan, table, scheduled[0].seq.block_size)
    wanted: dict[int, tuple[bytes, int]] = {}
    positions, spans, row = [], [], 0
    for b, item in enumerate(scheduled):
        seq = item.seq
        whole, delta = three_positions(seq.num_prompt_tokens, seq.images, MERGE)
        if not three_axes:
            whole, delta = np.stack([np.arange(seq.num_prompt_tokens)] * 3), 0
        assert seq.position_delta == delta
        behind = np.arange(seq.num_prompt_tokens, len(seq.token_ids) + 1) + delta
        of_all = np.concatenate([whole, np.stack([behind] * 3)], axis=1)
        positions.append(of_all[:, item.start : item.end])
        for placed in seq.images:
            first, last = max(item.start, placed.offset), min(item.end, placed.end)
            for i in range(first, last):
                wanted[row + i - item.start] = (placed.image.key, i - placed.offset)
            if first < last:
                spans.append((row + first - item.start, last - first, b, first))
        row += item.num_tokens
    axes = np.concatenate(positions, axis=1)
    if not wanted:
        assert batch.images is None
        assert batch.positions.tolist() == axes[0].tolist()
        return
    assert batch.images is not None
    found = zip(batch.images.rows.tolist(), batch.images.stored.tolist(), strict=True)
    assert {own: store.rows[stored] for own, stored in found} == wanted
    assert batch.images.positions.tolist() == axes.tolist()
    assert sorted(batch.images.spans) == sorted(spans)
    assert not batch.input_ids[batch.images.rows].any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kinds", "are_whole"),
    [("all tokens", False), ("all tokens", True), ("windows", True), ("states", False)],
)
def test_every_placeholder_gets_its_row(
    kinds: str, are_whole: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random prompts, chunks, preemptions, aborts, failed launches and steps in flight."""
    print("seed", seed)
    monkeypatch.setattr(LengthEstimator, "remaining", lambda self, seq: 1)
    rng = random.Random(seed)
    scheduler = make_scheduler(
        20, max_num_seqs=6, max_num_batched_tokens=rng.choice([24, 30]), **KINDS[kinds]
    )
    three_axes = not are_whole
    scheduler.images = EncoderCache(ImageFacts(CAPACITY, MERGE, three_axes, are_whole))
    store, in_flight = Store(), deque[Any]()
    table = SlotTable(7, 40, 2 if kinds == "windows" else 1)
    seqs: list[Sequence] = []
    cut = failed = 0
    while len(seqs) < 60 or not scheduler.is_finished():
        if len(seqs) < 60 and rng.random() < 0.4:
            tokens, images = make_prompt(rng)
            if len(tokens) < 60:
                seqs.append(seq := make_seq(tokens, max_tokens=rng.randint(1, 20), images=images))
                scheduler.add(seq)
        if rng.random() < 0.02:
            running = [seq for seq in seqs if not seq.is_finished]
            scheduler.abort(running[:1])
        scheduled = scheduler.schedule()
        check_scheduler(scheduler)
        if scheduled and not (kinds == "states" or in_flight) and rng.random() < 0.1:
            store.encode(scheduled)  # and the step fails
            failed += 1
            continue
        if scheduled:
            store.encode(scheduled)
            check_step(store, scheduled, table, three_axes)
            mark_sent(scheduled)
            scheduler.advance(scheduled)
            in_flight.append(scheduled)
            for item in scheduled:
                inside = [p for p in item.seq.images if p.offset < item.end < p.end]
                cut += bool(inside)
                assert not (inside and are_whole), "a chunk ends inside an image"
                begins = [p for p in item.seq.images if p.offset < item.start < p.end]
                assert not (begins and are_whole), "a chunk begins inside an image"
        while len(in_flight) > (bool(scheduled) and rng.random() < 0.7):
            step = in_flight.popleft()
            scheduler.postprocess(step, [rng.randint(1, 9) for item in step if item.samples])
        check_scheduler(scheduler)
    metrics = scheduler.describe()
    assert metrics["num_images_encoded"] > 20 and metrics["num_image_hits"] > 5
    assert store.num_encoded >= metrics["num_images_encoded"]
    assert scheduler.num_preemptions > 0 or kinds == "states"
    assert (cut > 0) != are_whole and (failed > 0 or kinds == "states")


def test_an_image_that_a_sequence_has_begun_keeps_its_rows() -> None:
    """Nobody else can have them until its last placeholder is computed."""
    cache, rng = EncoderCache(ImageFacts(6, MERGE, True)), random.Random(0)
    one, other = (
        make_seq([PAD] * 6 + [1], images=(PlacedImage(0, make_image(rng, which)),))
        for which in (1, 7)
    )
    for seq in (one, other):
        cache.join(seq)
    for start, end in ((0, 4), (4, 7)):
        cache.begin_step()
        assert cache.reach(one, start, end) == end
        item = ScheduledSequence(one, start, end - start, end == 7)
        cache.take(item)
        assert cache.reach(other, 0, 7) == 0, "in the same step"
        cache.launched([item])
        cache.begin_step()
        assert cache.reach(other, 0, 7) == (7 if end == 7 else 0)
