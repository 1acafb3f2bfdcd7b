"""A server of `nanovllm serve` in a thread of the test, and what asks it."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx", reason="needs httpx")
# What imports them comes after that.

from nanovllm import TINY, AsyncLLM  # noqa: E402
from nanovllm.serve.app import make_app  # noqa: E402
from nanovllm.serve.guard import Guard  # noqa: E402
from nanovllm.serve.server import Server, address_of, bind  # noqa: E402

PATIENCE = 60  # seconds, for what would hang for ever
OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_kvcache_blocks": 64, "kvcache_block_size": 16}
ASK = [{"role": "user", "content": "127+345="}]
JSON = {"Content-Type": "application/json"}
# Addresses are http: a client need not read the certificates of all authorities, 25 ms each time.
PLAIN: dict[str, Any] = {"timeout": PATIENCE, "verify": False}


class Heard(Server):
    """A server that says when it listens."""

    def __init__(self, app: Guard, grace: float) -> None:
        self.listens = threading.Event()
        self.socket = bind("127.0.0.1", 0)
        super().__init__(app, self.socket, grace, "test server at")

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@dataclass
class Place:
    """A server that runs."""

    url: str
    llm: AsyncLLM
    app: Guard
    server: Heard

    def get(self, path: str, **options: Any) -> Any:
        return httpx.get(self.url + path, **PLAIN, **options)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers={**JSON, **headers}, **PLAIN)

    def metrics(self) -> dict[str, Any]:
        return asyncio.run(self.llm.metrics())


@contextmanager
def serving(
    model: Any = TINY,
    *,
    names: Sequence[str] = ("tiny",),
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    max_waiting: int = 1024,
    grace: float = 1.0,
    **options: Any,
) -> Iterator[Place]:
    """A server, which ends with the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        llm = AsyncLLM(model, **{**OPTIONS, **options})
        app = make_app(llm, names, keys=keys, hosts=hosts, max_waiting=max_waiting)
        server = Heard(app, grace)
        thread = threading.Thread(target=server.listen, daemon=True)
        thread.start()
        try:
            assert server.listens.wait(PATIENCE)
            yield Place(f"http://{address_of(server.socket)}", llm, app, server)
        finally:
            server.handle_exit(15, None)
            thread.join(PATIENCE)
            server.socket.close()
            llm.exit()
        assert not thread.is_alive()
