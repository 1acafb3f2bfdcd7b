"""Large steps on several GPUs, on a CPU: what ranks send each other, where it arrives, and what
products make of it. One rank after another does its part of a layer, so a wait is checked when all
have sent.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import rare
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.distributed import bulk
from nanovllm.distributed.bulk import BulkExchange, Gathered, part_of
from nanovllm.distributed.group import Group
from nanovllm.kernels import all_reduce
from nanovllm.layers.base import Build
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from nanovllm.layers.sequence_parallel import Owned
from nanovllm.layers.weights.shard import Part
from nanovllm.tensors.fp8 import Codes

SEED = 10
MAX_ROWS, M, EPS = 130, 512, 1e-6
DTYPE = torch.float16  # as the interpreter, whose is exact


class Machine:
    """Regions in the memory of a CPU, the flags that somebody waits for, and the copying streams
    that have waited for what they copy, and have not signalled since.
    """

    def __init__(self) -> None:
        self.words: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.awaited: list[tuple[int, int]] = []
        self.ready: set[int] = set()
        self.current = 0

    def region(self, rank: int, device: torch.device, num_bytes: int, *_: object) -> Any:
        """Stands for `PeerRegion`."""
        region = type("Region", (), {})()
        region.words = torch.full((num_bytes // 8,), -1, dtype=torch.int64)  # NaN, read as numbers
        region.words.view(torch.uint8)[: 8 * bulk.FLAG_BYTES] = 0
        self.words.append(region.words)
        self.addresses.append(region.words.data_ptr())
        region.addresses, region.abort_address, region.call = self.addresses, 0, self.call
        return region

    def call(self, name: str, to: Any, source: Any, num_bytes: Any, stream: Any) -> None:
        assert name == "cuMemcpyDtoDAsync_v2" and stream.value in self.ready
        end = to.value + num_bytes.value
        assert any(
            words.data_ptr() <= to.value and end <= words.data_ptr() + words.nbytes
            for words in self.words
        )
        ctypes.memmove(to.value, source.value, num_bytes.value)

    def signal(self, flag: int, epoch: int) -> None:
        self.ready.remove(self.current)  # no copy may follow
        ctypes.c_int64.from_address(flag).value = epoch

    def wait_for(self, flag: int, epoch: int, abort: int) -> None:
        self.awaited.append((flag, epoch))

    def check_waits(self) -> None:
        """All that was waited for has come."""
        for flag, epoch in self.awaited:
            assert ctypes.c_int64.from_address(flag).value == epoch
        assert self.awaited
        self.awaited.clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(bulk, "PeerRegion", machine.region)
    monkeypatch.setattr(all_reduce, "signal", machine.signal)
    monkeypatch.setattr(all_reduce, "wait_for", machine.wait_for)

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            self.cuda_stream = id(self)

        def wait_stream(self, other: object) -> None:
            machine.ready.add(self.cuda_stream)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        machine.current = stream.cuda_stream
        yield
        machine.current = 0

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return machine


def exchanges_of(size: int) -> list[BulkExchange]:
    """Exchanges of all ranks."""
    abort, device = torch.zeros(1, dtype=torch.int64), torch.device("cpu")
    return [
        BulkExchange(rank, size, device, MAX_ROWS, M, DTYPE, abort, lambda data: [])
        for rank in range(size)
    ]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed)).to(DTYPE)


SIZES = (2, 130), (2, 17), (3, 100), (4, 33)
USUAL = {(2, 130, None), (2, 17, 0), (2, 17, 128), (3, 100, None), (3, 100, 128), (4, 33, 0)}
CASES = [(*size, act_block) for size in SIZES for act_block in (None, 0, 128)]


@pytest.mark.parametrize(
    ("size", "num_rows", "act_block"),
    [case if case in USUAL else rare(*case) for case in CASES],
)
def test_rows_of_large_steps(
    size: int, num_rows: int, act_block: int | None, machine: Machine
) -> None:
    """Rows of two layers: the second overwrites those that the first sent; its residual is divided.
    With 17 rows a rank has a single one, with 33 one of four has 1 and another none.
    """
    block = None if act_block is None else (128, 128) if act_block else (1, 0)
    how = Build(DTYPE, True, Group(), TorchBackend(), 64)
    quantization = None if block is None else Quantization(Fp8(block, "scale"), "fp8")
    build = how._replace(quantization=quantization)
    exchanges = exchanges_of(size)
    project = ColumnParallelLinear(Part.whole(M), {"": Part.whole(128)}, False, build)
    gated = MergedColumnParallelLinear(M, {"gate": 128, "up": 128}, False, build)
    for i, layer in enumerate((project, gated)):
        numbers = randn(*layer.weight.data.shape, seed=i)
        layer.weight.data.copy_(numbers if block is None else (numbers.float() * 50))
        if block is not None:
            layer.weight.scales.fill_(0.02)  # type: ignore[operator]
    norm = RMSNorm(M, EPS, build, act_block=act_block)
    assert project.act_block == gated.act_block == act_block
    begin = exchanges[0].own_rows(num_rows).data_ptr() - machine.addresses[0]
    assert begin % bulk.ALIGNMENT == 0
    norm.weight.copy_(randn(M, seed=2))
    parts = [part_of(rank, size, num_rows) for rank in range(size)]
    whole = torch.zeros(num_rows, M, dtype=torch.float64)
    own: list[Owned | None] = [None] * size
    for turn in range(2):
        results = [randn(num_rows, M, seed=10 * turn + 3 + rank) for rank in range(size)]
        scattered = [
            exchange.scatter(num_rows, rows_of(x))
            for exchange, x in zip(exchanges, results, strict=True)
        ]
        machine.check_waits()
        whole += sum(x.double() for x in results)
        gathered: list[Gathered] = []
        for rank, x in enumerate(scattered):
            normed, total = norm.add_forward(x, own[rank])
            assert isinstance(normed, Gathered) and isinstance(total, Owned)
            gathered.append(normed)
            own[rank] = total
            close(total.rows[: len(total.held)], whole[parts[rank]])
        factor = (whole.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.weight
        wanted, largest = whole * factor, whole.abs().max()
        for rank, x in enumerate(gathered):
            assert isinstance(x.rows, Codes) == (act_block is not None)
            with_rows = [part for part in parts if part.start < part.stop]
            arrived = [*awaited_parts(x, machine)]
            assert sorted(arrived, key=with_rows.index) == with_rows
            assert arrived[0] == parts[rank] or parts[rank] not in with_rows
            machine.check_waits()
            # Sums, and rows before and after weights, are rounded by 2^-11.
            rows, bound = x.rows, 2.0**-9 * (wanted.abs() + largest * factor.abs())
            if isinstance(rows, Codes):
                rows, bound = rows.numbers(), bound + 2.0**-4 * wanted.abs() + 1e-5
            assert ((rows - wanted).abs() <= bound).all()
            for layer in (project, gated):
                matrix = layer.weight.data.double() * (1 if block is None else 0.02)
                product = rows.double() @ matrix.T
                out = layer.gated(x) if layer is gated else layer(x)
                assert isinstance(out, torch.Tensor)
                if layer is gated:
                    gates, ups = product.chunk(2, 1)
                    product = torch.nn.functional.silu(gates) * ups
                close(out, product)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_of_other_sizes_and_formats_follow(size: int, machine: Machine) -> None:
    """Numbers and codes lie in the same bytes, and the views of the step before are not taken."""
    exchanges = exchanges_of(size)
    norm = RMSNorm(M, EPS, Build(DTYPE, True, Group(), TorchBackend(), 64))
    weight = norm.weight.copy_(randn(M, seed=1))
    steps = ((130, 0), (130, 128), (17, 0), (130, None), (60, 128), (60, 0), (59, None), (59, 0))
    for turn, (num_rows, act_block) in enumerate(steps):
        x = randn(num_rows, M, seed=2 + turn)
        scattered = [exchange.scatter(num_rows, rows_of(x / size)) for exchange in exchanges]
        norm.act_block = act_block
        gathered = [norm.add_forward(each, None)[0] for each in scattered]
        wanted = torch.nn.functional.rms_norm(x.double(), (M,), weight.double(), EPS)
        for each in gathered:
            rows = each.rows.numbers() if isinstance(each.rows, Codes) else each.rows
            error = (rows - wanted).abs()
            assert rows.shape == x.shape and (error <= 0.07 * wanted.abs() + 0.02).all()


def awaited_parts(x: Gathered, machine: Machine) -> Iterator[slice]:
    """Parts of other ranks come when their flag has been waited for, not before."""
    rank, size = x.exchange.rank, x.exchange.size
    owners = {part_of(owner, size, len(x.rows)).start: owner for owner in range(size)}
    for part in x.parts():
        flag = machine.addresses[rank] + bulk.FLAG_BYTES * (size + owners[part.start])
        assert owners[part.start] == rank or (flag, x.epoch) in machine.awaited
        yield part


def rows_of(x: torch.Tensor) -> Callable[[slice, torch.Tensor], None]:
    """A product, of which x is the result; none has no rows."""

    def compute(rows: slice, out: torch.Tensor) -> None:
        assert len(out)
        out.copy_(x[rows])

    return compute


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check closeness in float16."""
    atol = 4e-3 * float(wanted.abs().amax()) if len(wanted) else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=4e-3, atol=atol)
