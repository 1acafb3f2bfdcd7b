"""Clients of benchmarks/serve.py, in a process of their own: they would take Python's lock from the
server. Reads a job as JSON from standard input, and writes what they found as JSON.

A job has `host`, `port`, `path`, `bodies` (one for each client), `together` (whether all ask at
once, or one after the other), and `idle` (number of connections that are open meanwhile).
"""

import argparse
import asyncio
import json
import re
import resource
import sys
import time
from functools import partial
from typing import Any

USAGE = re.compile(rb'"completion_tokens":(\d+)')
END = b"data: [DONE]\n\n"


class Client(asyncio.Protocol):
    """A client that asks, and reads a stream to its end.

    Attributes:
        first, last: seconds from its question to the first piece and to the end.
        num_tokens: number of tokens by the usage at the end.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._tail = request, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = self.last = 0.0
        self.num_tokens = 0

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        self._began, self._transport = time.perf_counter(), transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note times, and keep no more than the end."""
        if not self.first and b"data: " in data:
            self.first = time.perf_counter() - self._began
        self._tail = (self._tail + data)[-1000:]
        if END in self._tail:
            self.last = time.perf_counter() - self._began
            found = USAGE.findall(self._tail)
            self.num_tokens = int(found[-1]) if found else 0
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Say so, whether all has come or not."""
        if self.last:
            self.done.set_result(None)
        else:
            self.done.set_exception(error or ConnectionError(self._tail.decode(errors="replace")))


async def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job. Returns the seconds of all, their tokens, and the seconds to each first piece."""
    loop, address = asyncio.get_running_loop(), (job["host"], job["port"])

    async def ask(request: bytes) -> Client:
        _, client = await loop.create_connection(partial(Client, request), *address)
        await client.done
        return client

    requests = []
    for body in job["bodies"]:
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        head = f"POST {job['path']} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    idle = [await asyncio.open_connection(*address) for _ in range(job["idle"])]
    start = time.perf_counter()
    if job["together"]:
        clients = await asyncio.gather(*map(ask, requests))
    else:
        clients = [await ask(request) for request in requests]
    seconds = time.perf_counter() - start
    for _, writer in idle:
        writer.close()
    tokens = [client.num_tokens for client in clients]
    return {"seconds": seconds, "tokens": tokens, "first": [client.first for client in clients]}


def main() -> None:
    """Do the job that standard input has."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.read())))))


if __name__ == "__main__":
    main()
