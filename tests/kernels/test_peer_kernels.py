"""Kernels that exchange rows between ranks, in Triton's interpreter: a rank is a process."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from draws import interpreted, oracle_draw
from peer_ranks import EPS, Job, RankProcesses, region_files

from checkpoints import rare
from nanovllm.kernels.all_reduce import signal, sums_by_owner, wait_for
from nanovllm.layers.embed_head import local_vocab, vocab_span
from nanovllm.sampling_params import NO_TOKEN

pytestmark = interpreted

SEED = 31
MAX_ROWS = 8
M = 40
ROWS = [6, 2, 8, 1, 8]  # of the calls, in turn: rows have different numbers of calls
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses(3)
    yield processes
    processes.close()


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED * 1000 + seed))


def jobs(
    directory: Path,
    dtype: torch.dtype,
    calls: list[list[dict[str, Any]]],
    M: int = M,
    **options: Any,
) -> list[Job]:
    size = len(calls)
    return [
        Job(directory, rank, size, MAX_ROWS, M * dtype.itemsize, calls[rank], **options)
        for rank in range(size)
    ]


def norm_inputs(
    i: int, size: int, dtype: torch.dtype, parts: int, M: int = M
) -> list[dict[str, Any]]:
    """Inputs of call i, by rank. Every third call has no residual."""
    T = ROWS[i]
    weight = randn(M, seed=i).to(dtype)
    residual = None if i % 3 == 2 else randn(T, M, seed=100 + i).to(dtype)
    xs = [randn(parts, T, M, seed=200 + 10 * i + rank) for rank in range(size)]
    return [
        {
            # Partial results of a product are float32 whatever the dtype; a whole one is not.
            "x": x if parts > 1 else x.to(dtype),
            "residual": residual,
            "weight": weight,
            "eps": EPS,
        }
        for x in xs
    ]


NEVER = 99  # rows
WAYS = pytest.mark.parametrize("owners_from", [rare(NEVER), 0], ids=["by-all", "by-owner"])
MIXED = [NEVER, 6, 0]


@pytest.mark.parametrize(
    "owners_from", [rare(NEVER), 6, rare(0)], ids=["by-all", "both", "by-owner"]
)
@pytest.mark.parametrize("parts", [rare(1), 4], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", [rare(torch.float32), torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("size", [rare(2), 3])
def test_norm_sums_over_the_ranks(
    processes: RankProcesses,
    size: int,
    dtype: torch.dtype,
    parts: int,
    owners_from: int,
    tmp_path: Path,
) -> None:
    """Against float64, call after call through both buffers; ranks agree bit by bit, since a rank
    that goes on with other numbers ends with other tokens.
    """
    calls = [norm_inputs(i, size, dtype, parts) for i in range(len(ROWS))]
    by_rank = [[call[rank] for call in calls] for rank in range(size)]
    todo = jobs(tmp_path, dtype, by_rank, owners_from=owners_from)
    done = [answer for answer, _ in processes.run(todo)]
    for i, call in enumerate(calls):
        total = sum(inputs["x"].double().sum(0) for inputs in call)
        residual, weight = call[0]["residual"], call[0]["weight"]
        total = total if residual is None else total + residual
        normed = torch.nn.functional.rms_norm(total, (M,), weight.double(), EPS)
        for answer in done:
            found_normed, found_total = answer.results[i]
            assert found_normed.dtype == found_total.dtype == dtype
            tolerance = TOLERANCE[dtype]
            for found, wanted in ((found_total, total), (found_normed, normed)):
                torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
            assert torch.equal(found_normed, done[0].results[i][0])
            assert torch.equal(found_total, done[0].results[i][1])
    exchanged = [sum(row < T for T in ROWS) for row in range(MAX_ROWS)]
    assert [answer.epochs for answer in done] == [exchanged] * size
    assert len(set(exchanged)) > 2
    for region in region_files(tmp_path, size):
        assert set(region.read_bytes()) == {0xFF}, "whoever reads leaves nothing behind"


@WAYS
def test_long_rows_are_summed_a_few_at_a_time(
    processes: RankProcesses, owners_from: int, tmp_path: Path
) -> None:
    """Two ranks' and then the third's; both buffers."""
    M = 4100
    calls = [norm_inputs(i, 3, torch.float32, 1, M) for i in (1, 3, 1)]
    by_rank = [[call[rank] for call in calls] for rank in range(3)]
    todo = jobs(tmp_path, torch.float32, by_rank, M, owners_from=owners_from)
    for answer, _ in processes.run(todo):
        for call, (_, found) in zip(calls, answer.results, strict=True):
            total = sum(inputs["x"][0].double() for inputs in call) + call[0]["residual"]
            torch.testing.assert_close(found.double(), total, atol=1e-5, rtol=0)


def test_owners_sum_where_much_is_saved() -> None:
    """Four ranks give 1.5 rows instead of 3, eight 1.75 instead of 7; two would save nothing."""

    def least(size: int, row_bytes: int) -> int:
        peers: Any = SimpleNamespace(size=size, row_bytes=row_bytes)
        return next((n for n in range(1, 2000) if sums_by_owner(peers, n)), 0)

    found = [least(size, 8192) for size in (2, 3, 4, 8)]
    assert found == [0, 48, 22, 7]
    assert least(4, 4096) == 43
    assert not sums_by_owner(None, 1 << 20)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(3, torch.float32), pytest.param(2, torch.float16, marks=pytest.mark.slow)],
)
def test_each_row_has_its_own_place(
    processes: RankProcesses, size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In both buffers: where rows overlap, it is a matter of luck whether they are read before they
    are overwritten. One rank gives, and nobody takes.
    """
    calls = [norm_inputs(i, size, dtype, 1)[-1] for i in (1, 3, 1)]
    job = jobs(tmp_path, dtype, [calls] * size)[-1]
    processes.run([job._replace(aborted="host")])
    for region in region_files(tmp_path, size)[:-1]:
        data = np.fromfile(region, np.uint8).reshape(2, size, MAX_ROWS, M * dtype.itemsize)
        assert (data[:, :-1] == 0xFF).all(), "the places of the others"
        for row in range(2):
            given = [call["x"][0, row] for call in calls if row < call["x"].shape[1]]
            for number in (len(given) - 2, len(given) - 1):  # the last two calls
                found = torch.from_numpy(data[number % 2, -1, row]).view(dtype)
                assert torch.equal(found, given[number])


def test_owners_share_the_rows(processes: RankProcesses, tmp_path: Path) -> None:
    """The last of three ranks gives each row to one, and the sums of its own to both others."""
    calls = [[norm_inputs(0, 3, torch.float32, 1)[2]]] * 3
    job = jobs(tmp_path, torch.float32, calls, owners_from=0, aborted="device")[-1]
    processes.run([job])
    for rank, region in enumerate(region_files(tmp_path, 3)[:2]):
        data = np.fromfile(region, np.uint8).reshape(2, 3, MAX_ROWS, M * 4)
        given = (data[0, -1] != 0xFF).any(-1).nonzero()[0]
        assert given.tolist() == [row for row in range(ROWS[0]) if row % 3 in (rank, 2)]


def sample_inputs(i: int, size: int, V: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The whole logits [n, V] of call i, and by rank its arguments. Row 0 is greedy, with ties; the
    last has a NaN, if there are more, of which one rank knows.
    """
    n = ROWS[i]
    rng = np.random.default_rng(SEED + i)
    logits = rng.normal(0, 2, (n, V)).astype(np.float32)
    if n > 1:
        logits[-1, [0, V - 1][i % 2]] = np.nan
    logits[0, [V // 2, V - 1, V // 4]] = 9
    temperatures = np.linspace(0, 1.5, n, dtype=np.float32)
    calls = []
    for rank in range(size):
        vocab = local_vocab(V, rank, size)
        calls.append(
            {
                "logits": torch.from_numpy(logits[:, vocab.start : vocab.stop].copy()),
                "temperatures": torch.from_numpy(temperatures),
                "keys": torch.arange(2 * n, dtype=torch.int32).view(2, n) * 77 + i,
                "positions": torch.arange(n, dtype=torch.int32) + 5,
                "slots": torch.arange(n, 0, -1, dtype=torch.int32),
                "table": torch.full((n + 2,), -5, dtype=torch.int32),
                "span": vocab_span(V),
                "start": vocab.start,
            }
        )
    return logits, calls


@pytest.mark.parametrize("V", [rare(120), 20], ids=["shared", "last-rank-empty"])
@pytest.mark.parametrize("size", [rare(2), 3])
def test_the_best_of_all_ranks_is_drawn(
    processes: RankProcesses, size: int, V: int, tmp_path: Path
) -> None:
    """The token that the oracle draws from the whole vocabulary: two GPUs write one GPU's text."""
    inputs = [sample_inputs(i, size, V) for i in range(len(ROWS))]
    by_rank = [[calls[rank] for _, calls in inputs] for rank in range(size)]
    sizes = [call["logits"].shape[1] for call in inputs[0][1]]
    assert sum(sizes) == V and (0 in sizes) == (V == 20 and size == 3)
    answers = processes.run(jobs(tmp_path, torch.float32, by_rank))
    drawn_by: set[int] = set()
    num_clear = num_drawn = 0
    for i, (logits, calls) in enumerate(inputs):
        everyone = [answer.results[i][0] for answer, _ in answers]
        drawn = everyone[0]
        assert all(torch.equal(tokens, drawn) for tokens in everyone)
        for _, tables in answers:
            assert tables[i].tolist() == [-5, *drawn.clamp(min=0).flip(0).tolist(), -5]
        assert int(drawn[0]) == V // 4, "the first of equals"
        starts = [c["start"] for c in calls if c["logits"].shape[1]]
        drawn_by |= set(np.searchsorted(starts, drawn[drawn >= 0].numpy(), "right").tolist())
        if len(drawn) == 1:
            continue
        assert int(drawn[-1]) == NO_TOKEN
        if len(drawn) == 2:
            continue
        call, rows = calls[0], slice(1, -1)
        num_drawn += len(drawn) - 2
        keys = call["keys"].numpy().view(np.uint32)[:, rows]
        of_rows = call["temperatures"].numpy()[rows], keys, call["positions"].numpy()[rows]
        wanted, lead = oracle_draw(logits[rows], *of_rows, vocab_span(V))
        clear = lead > 1e-4  # not decided by the rounding of float32
        num_clear += clear.sum()
        assert (drawn[rows].numpy() == wanted)[clear].all()
    assert num_clear > 0.9 * num_drawn > 0
    assert len(drawn_by) == sum(n > 0 for n in sizes), "every rank has won"


@pytest.mark.slow
def test_both_kernels_share_the_memory(processes: RankProcesses, tmp_path: Path) -> None:
    """A step's norms, however they are summed, and its sampling take turns on the same rows."""
    calls: list[list[dict[str, Any]]] = [[], [], []]
    for i in range(len(ROWS)):
        norms, (_, samples) = norm_inputs(i, 3, torch.float32, 1), sample_inputs(i, 3, 120)
        for rank in range(3):
            calls[rank] += [norms[rank], samples[rank]]

    def run(calls: list[list[dict[str, Any]]], **options: Any) -> list[Any]:
        answers = processes.run(jobs(tmp_path, torch.float32, calls, **options))
        for region in region_files(tmp_path, 3):
            assert set(region.read_bytes()) == {0xFF}
        return [answer.results for answer, _ in answers]

    alone = [run([c[kind::2] for c in calls]) for kind in (0, 1)]
    for owners_from in MIXED:
        together = run(calls, owners_from=owners_from)
        for kind in (0, 1):
            for mixed, single in zip(together, alone[kind], strict=True):
                for found, wanted in zip(mixed[kind::2], single, strict=True):
                    assert torch.equal(found[0], wanted[0])


@WAYS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float16"])
def test_what_looks_like_nothing_arrives(
    processes: RankProcesses, dtype: torch.dtype, owners_from: int, tmp_path: Path
) -> None:
    """A NaN may have the bits of a place that waits."""
    calls = [norm_inputs(0, 2, dtype, 1)[rank] for rank in range(2)]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    calls[1]["x"][0, 2].view(bits)[3:5] = torch.tensor([-1, -2])
    todo = jobs(tmp_path, dtype, [[call] for call in calls], owners_from=owners_from)
    for answer, _ in processes.run(todo):
        ((_, total),) = answer.results
        assert total.isnan().nonzero().tolist() == [[2, 3], [2, 4]]


@WAYS
def test_defect_13_nobody_waits_for_a_rank_that_is_gone(
    processes: RankProcesses, owners_from: int, tmp_path: Path
) -> None:
    """Once the word in the host's memory is set, kernels end without what they wait for: the rows
    of the others, or the sum.
    """
    norms, (_, samples) = norm_inputs(1, 2, torch.float32, 1), sample_inputs(1, 2, 120)
    calls = [[norms[0], samples[0]], []]
    (job, _) = jobs(tmp_path, torch.float32, calls, owners_from=owners_from, aborted="host")
    ((answer, _),) = processes.run([job])
    assert len(answer.results) == 2


def test_flags_between_kernels() -> None:
    """Setting a flag by its address, and waiting for it or for the end of all waiting."""
    flags = torch.tensor([0, 7, 0])
    abort = torch.zeros(1, dtype=torch.int64)
    addresses = [flags.data_ptr() + 8 * i for i in range(3)]
    signal(addresses[2], 5)
    assert flags.tolist() == [0, 7, 5]
    for address in addresses[1:]:
        wait_for(address, 5, abort.data_ptr())
    abort.fill_(1)
    wait_for(addresses[0], 5, abort.data_ptr())
    assert flags.tolist() == [0, 7, 5]


def test_flags_at_a_low_address() -> None:
    """Triton takes such an address for an int32. The heap of a program may be that low."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    read_write, private_anonymous_32bit = 3, 0x62
    address = libc.mmap(None, 4096, read_write, private_anonymous_32bit, -1, 0)
    assert 0 < address < 1 << 31
    signal(address, 5)
    assert ctypes.c_int64.from_address(address).value == 5
    wait_for(address, 5, address + 8)
    libc.munmap(ctypes.c_void_p(address), 4096)
