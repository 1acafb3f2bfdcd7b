"""Collectives of the ranks, and the division of vocabulary and heads among them."""

import random
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ranks_in_threads import PATIENCE, connected_groups, on_all_ranks
from torch import distributed as dist

from checkpoints import small_config
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.distributed.bulk import Gathered, part_of
from nanovllm.distributed.group import Group, LostContactError
from nanovllm.layers.base import Build
from nanovllm.layers.embed_head import ParallelLMHead, local_vocab, vocab_span
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear, local_kv_heads
from nanovllm.layers.sequence_parallel import Owned, gather_owned_rows
from nanovllm.utils.context import Context, use_context

CPU = torch.device("cpu")
SEED = 29
SIZES = range(1, 9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size: int) -> None:
    """Sums, stacks and minima are those of all ranks, whatever the dtype and however often."""
    groups = connected_groups(size)
    xs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    values = [7, 3, -9, 4][:size]

    def exchange(rank: int) -> tuple[Any, ...]:
        group = groups[rank]
        summed = xs[rank].clone()
        assert group.all_reduce(summed) is summed, "it takes the place of the part"
        for _ in range(3):
            counted = group.all_reduce(torch.full((2,), rank + 1.0))
        gathered = group.all_gather(xs[rank].double().T)  # its rows are not adjacent
        return summed, counted, gathered, group.minimum(values[rank])

    for summed, counted, gathered, smallest in on_all_ranks(size, exchange):
        torch.testing.assert_close(summed.double(), sum(x.double() for x in xs))
        assert counted.tolist() == [sum(range(1, size + 1))] * 2
        assert gathered.dtype is torch.float64 and gathered.shape == (size, 5, 3)
        assert all(torch.equal(part, x.double().T) for part, x in zip(gathered, xs, strict=True))
        assert smallest == min(values) and type(smallest) is int
    assert {group.describe() for group in groups} == {"gloo" if size > 1 else "none"}
    for group in groups:
        group.close()


def test_sums_in_the_order_of_ranks() -> None:
    """Whatever the size: Gloo, too, divides large tensors over the ranks, and begins with another
    one in each part.
    """
    size, width = 4, 5000
    xs = [
        torch.randn(width, generator=torch.Generator().manual_seed(SEED + i)) for i in range(size)
    ]
    xs[1] *= 1e4  # so that the order matters
    xs[3] = -xs[1] + xs[3]
    groups, counts = connected_groups(size), (1, 3, width)

    def add(rank: int) -> list[torch.Tensor]:
        plain = groups[rank].all_reduce(xs[rank].clone())
        groups[rank].keep_order()
        return [plain, *(groups[rank].all_reduce(xs[rank][:count].clone()) for count in counts)]

    wanted = ((xs[0] + xs[1]) + xs[2]) + xs[3]
    for plain, *sums in on_all_ranks(size, add):
        assert all(part.equal(wanted[: len(part)]) for part in sums)
        assert not plain.equal(wanted), "the order would not matter"
    for group in groups:
        group.close()


def test_defect_12_two_groups_meet_at_ports_of_their_own() -> None:
    """A fixed port let the ranks of two engines meet each other, or one of them fail."""
    stores = [dist.HashStore() for _ in range(2)]
    groups = [[Group(rank, 2) for rank in range(2)] for _ in stores]

    def meet(who: int) -> float:
        group = groups[who // 2][who % 2]
        group.connect(stores[who // 2], CPU)
        return float(group.all_reduce(torch.tensor([10.0 ** (who // 2)])))

    assert on_all_ranks(4, meet) == [2, 2, 20, 20]


@pytest.mark.parametrize("exchange", ["minimum", "_share"])
def test_defect_13_what_an_aborted_exchange_gives_is_not_used(exchange: str) -> None:
    """NCCL's aborted kernels just end, and what they would have written is anything."""
    group = Group(0, 2)
    group._device = CPU
    group._backend = Mock(all_gather=lambda out, x: group.abort())
    with pytest.raises(LostContactError):
        getattr(group, exchange)({"minimum": 3, "_share": b"abc"}[exchange])


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_defect_13_a_collective_that_fails_is_lost_contact(collective: str) -> None:
    group = Group(0, 2)
    fails = Mock(side_effect=RuntimeError("connection closed by peer"))
    group._backend = Mock(**{collective: fails})
    with pytest.raises(LostContactError, match=r"other ranks failed: connection closed"):
        getattr(group, collective)(torch.zeros(2))
    group.abort()
    with pytest.raises(LostContactError, match="another rank has died"):
        getattr(group, collective)(torch.zeros(2))
    assert fails.call_count == 1


def test_gloo_has_no_time_limit_once_the_ranks_have_met() -> None:
    """A rank may be hours behind: rank 0 waits for its caller."""
    group, _ = connected_groups(2)
    assert group._backend._group.options._timeout == timedelta(seconds=PATIENCE)  # of these tests


def test_one_rank_has_no_process_group() -> None:
    """Defect 12: a single GPU took a port, and failed if it was taken."""
    group = Group()
    x = torch.ones(2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x).shape == (1, 2)
    assert group.minimum(5) == 5
    assert group.describe() == "none"
    assert not group.can_exchange(x)


def test_ranks_divide_every_vocabulary() -> None:
    """Every token on exactly one rank, in order, in whole spans: what is sampled must not depend
    on how many ranks sample it.
    """
    print("seed", SEED)
    rng = random.Random(SEED)
    sizes = [*range(1, 700), *(rng.randint(700, 300_000) for _ in range(300)), 32_000, 151_936]
    uneven = empty = 0
    for V in sizes:
        span = vocab_span(V)
        assert 16 <= span <= 4096 and span & (span - 1) == 0
        for size in SIZES:
            parts = [local_vocab(V, rank, size) for rank in range(size)]
            assert all(part.start % span == 0 for part in parts)
            filled = [part for part in parts if len(part)]
            assert parts[: len(filled)] == filled, "the empty ones come last"
            assert filled[0].start == 0 and filled[-1].stop == V
            assert all(a.stop == b.start for a, b in pairwise(filled))
            assert all(len(part) == len(filled[0]) for part in filled[:-1])
            uneven += len({len(part) for part in filled}) > 1
            empty += len(filled) < size
    assert uneven and empty
    for size in SIZES:  # a large one is shared by all
        assert all(len(local_vocab(151_936, rank, size)) for rank in range(size))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 1), (8, 2), (8, 4), (8, 8), (16, 4)])
def test_query_heads_meet_their_kv_head(num_heads: int, num_kv_heads: int) -> None:
    """Query head h belongs to KV head h * Hkv // Hq, on whichever rank it is."""
    for size in (1, 2, 4, 8):
        per_rank = num_heads // size
        for rank in range(size):
            heads = local_kv_heads(num_kv_heads, Group(rank, size))
            queries = range(rank * per_rank, (rank + 1) * per_rank)
            assert list(heads) == sorted({h * num_kv_heads // num_heads for h in queries})


def test_a_bias_is_added_once() -> None:
    """Added on each rank, that of a row-parallel layer would count once for each of them."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = ((3, 8), (6, 8), (6,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    for size in (1, 2, 4):
        groups = connected_groups(size)

        def forward(rank: int, size: int = size, groups: list[Group] = groups) -> torch.Tensor:
            layer = RowParallelLinear(
                8, 6, True, Build(torch.float64, False, groups[rank], TorchBackend(), 64)
            )
            columns = slice(rank * 8 // size, (rank + 1) * 8 // size)
            layer.weight.data.copy_(weight[:, columns])
            layer.bias.data.copy_(bias)
            return layer(x[:, columns])

        for out in on_all_ranks(size, forward):
            torch.testing.assert_close(out, x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_last_norm_gathers_the_rows_that_attention_kept(size: int) -> None:
    """Rows of a residual that is divided over the ranks, as in large steps on several GPUs."""
    generator = torch.Generator().manual_seed(SEED)
    residual, x = (torch.randn(n, 8, generator=generator) for n in (70, 5))
    rows = torch.tensor([0, 3, 33, 64, 69], dtype=torch.int32)
    wanted = residual[rows.long()] + x
    context = Context(0, rows, rows, rows, kept_rows=rows)
    groups = connected_groups(size)

    def forward(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = RMSNorm(8, 1e-6, Build(torch.float32, False, groups[rank], TorchBackend(), 64))
        norm.weight.fill_(1)
        part = part_of(rank, size, 70)
        spare = torch.full((3, 8), torch.nan)  # after the rows that a rank holds
        own = Owned(torch.cat([residual[part], spare]), range(part.start, part.stop))
        with use_context(context), torch.inference_mode():
            normed, total = norm.add_forward(x, own)
        assert isinstance(total, torch.Tensor) and isinstance(normed, torch.Tensor)
        return normed, total

    for normed, total in on_all_ranks(size, forward):
        torch.testing.assert_close(total, wanted)
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(wanted, (8,), eps=1e-6))


def test_a_rank_without_tokens_has_no_logits(tmp_path: Path) -> None:
    build = Build(torch.float32, False, Group(3, 4), TorchBackend(), 64)
    head = ParallelLMHead(small_config(tmp_path, vocab_size=20, hidden_size=8), build)
    assert len(head.vocab) == 0
    assert head(torch.ones(5, 8)).shape == (5, 0)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_parts_of_large_steps_cover_all_rows_once(size: int) -> None:
    """Also where the last are empty, and none is longer than that of the largest step."""
    longest = part_of(0, size, 2000).stop
    empty = 0
    for num_rows in range(1, 2000):
        parts = [part_of(owner, size, num_rows) for owner in range(size)]
        assert [row for part in parts for row in range(part.start, part.stop)] == [*range(num_rows)]
        assert max(part.stop - part.start for part in parts) <= longest
        empty += parts[-1].start == parts[-1].stop
    assert empty > 0


@pytest.mark.parametrize("num_rows", [1, 17, 40, 96])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_picked_by_all_ranks_add_up(size: int, num_rows: int) -> None:
    """Each row comes from the rank that has it, whether others have none or some."""
    whole = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(SEED))
    rows = torch.tensor([0, num_rows // 2, num_rows - 1], dtype=torch.int32)
    picked = []
    for rank in range(size):
        exchange: Any = SimpleNamespace(rank=rank, size=size)
        gathered = Gathered(torch.empty_like(whole), 1, exchange)
        held = gathered.held
        assert held == range(num_rows)[part_of(rank, size, num_rows)]
        picked.append(gather_owned_rows(whole[held.start : held.stop], rows, held))
    assert torch.equal(torch.stack(picked).sum(0), whole[rows])
    assert all(part.shape == (3, 3) for part in picked)
