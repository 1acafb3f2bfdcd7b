"""Processes that run the kernels of a rank in Triton's interpreter, over memory that they share."""

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interpreter import make_faster, poll_whole_numbers

from nanovllm.kernels import all_reduce, norm
from nanovllm.kernels.sampling.draw import sample

PATIENCE = 60  # seconds
EPS = 1e-6


class SharedMemory:
    """Stands for `PeerMemory`: regions that are files, mapped into all processes."""

    def __init__(
        self, directory: Path, rank: int, size: int, max_rows: int, row_bytes: int
    ) -> None:
        self.rank, self.size, self.max_rows, self.row_bytes = rank, size, max_rows, row_bytes
        num_bytes = region_bytes(size, max_rows, row_bytes)
        self.regions = [
            torch.from_file(str(region), shared=True, size=num_bytes, dtype=torch.uint8)
            for region in region_files(directory, size)
        ]
        self.abort = torch.zeros(1, dtype=torch.int64)
        self.seen = torch.zeros(1, dtype=torch.int64)
        parts = [*self.regions, self.abort, self.seen]
        self.addresses = torch.tensor([part.data_ptr() for part in parts])
        self.epochs = torch.zeros(max_rows, dtype=torch.int64)


def region_files(directory: Path, size: int) -> list[Path]:
    return [directory / f"region-{rank}" for rank in range(size)]


def region_bytes(size: int, max_rows: int, row_bytes: int) -> int:
    """[2, size, max_rows, row_bytes]"""
    return 2 * size * max_rows * row_bytes


class Job(NamedTuple):
    """Calls that a rank makes, in order: keyword arguments of `add_rms_norm` or of `sample`."""

    directory: Path
    rank: int
    size: int
    max_rows: int
    row_bytes: int
    calls: list[dict[str, Any]]
    aborted: str = ""  # whose word tells kernels not to wait, "host" or "device"
    owners_from: int = 1 << 30  # rows of a call from which each is summed by one rank


class Done(NamedTuple):
    """Results of the ranks, and the number of exchanges of each row."""

    results: list[tuple[torch.Tensor, torch.Tensor]]
    epochs: list[int]


def serve(connection: Connection) -> None:
    """Do jobs until nobody is there to send them."""
    torch.set_num_threads(1)
    make_faster()
    poll_whole_numbers()
    all_reduce.POLLS_OF_HOST = all_reduce.POLLS  # a poll takes a thousand times as long as on a GPU
    while True:
        job = connection.recv()
        try:
            memory: Any = SharedMemory(*job[:5])
            memory.abort.fill_(job.aborted == "host")
            memory.seen.fill_(job.aborted == "device")
            norm.sums_by_owner = lambda _, num_rows, least=job.owners_from: num_rows >= least
            results = [
                sample(**call, peers=memory)
                if "span" in call
                else norm.add_rms_norm(**call, peers=memory)
                for call in job.calls
            ]
            assert memory.seen.item() == bool(job.aborted), "kernels that follow need not wait"
            tables = [call["table"] for call in job.calls if "table" in call]
            connection.send((Done(results, memory.epochs.tolist()), tables))
        except BaseException:
            connection.send(traceback.format_exc())


class RankProcesses:
    """`count` processes, to be closed."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is loaded once, not by each
        self.processes, self.connections = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(theirs,), daemon=True))
            self.connections.append(ours)
            self.processes[-1].start()
            theirs.close()

    def run(self, jobs: list[Job]) -> list[tuple[Done, list[torch.Tensor]]]:
        """All ranks' jobs at once."""
        first = jobs[0]
        for region in region_files(first.directory, first.size):
            num_bytes = region_bytes(first.size, first.max_rows, first.row_bytes)
            region.write_bytes(b"\xff" * num_bytes)
        for connection, job in zip(self.connections, jobs, strict=False):
            connection.send(job)
        answers = []
        for connection, job in zip(self.connections, jobs, strict=False):
            assert connection.poll(PATIENCE), f"rank {job.rank} waits for ever"
            answers.append(connection.recv())
            assert not isinstance(answers[-1], str), answers[-1]
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
