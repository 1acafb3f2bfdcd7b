"""A host of pictures on loopback, which misbehaves as it is told."""

import io
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image as Pillow

PATIENCE = 60  # seconds, for what would hang for ever
Page = Callable[[BaseHTTPRequestHandler], None]


def picture(seed: int) -> bytes:
    """A PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Pillow.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


class PictureHost:
    """A host that runs.

    Attributes:
        port: its port; its names are 127.0.0.1 and localhost.
        pages: what it does for a path; it sends the picture of the seed N for /N.png.
        asked: path and headers of each request.
        gate: what some pages wait for, and all of them at the end.
    """

    def __init__(self, port: int) -> None:
        self.port, self.gate = port, threading.Event()
        self.pages: dict[str, Page] = {}
        self.asked: list[tuple[str, Any]] = []

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    def leads(self, path: str, to: str, status: int = 302) -> None:
        """Make a path a redirect."""

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            send(handler, b"", status, Location=to)

        self.pages[f"/{path}"] = redirect

    def waits(self, path: str, seed: int = 1) -> None:
        """Have a path answer with the picture of a seed once the gate is open."""

        def slow(handler: BaseHTTPRequestHandler) -> None:
            assert self.gate.wait(PATIENCE)
            send(handler, picture(seed))

        self.pages[f"/{path}"] = slow

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.asked.append((path, handler.headers))
        if page := self.pages.get(path):
            page(handler)
        elif (name := path[1:].partition(".png")[0]).isdigit():
            send(handler, picture(int(name)))
        else:
            send(handler, b"not here", 404)


def send(
    handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: object
) -> None:
    """Send an answer. Headers have _ for -; those that are "" are left out."""
    handler.send_response(status)
    for name, value in {"Content_Length": len(body), **headers}.items():
        if value != "":
            handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def picture_host(context: ssl.SSLContext | None = None) -> Iterator[PictureHost]:
    """A host, of https if it has a context. It ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.answer(self)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request: Any, client_address: Any) -> None:
            if context is not None:
                request = context.wrap_socket(request, server_side=True)
            super().finish_request(request, client_address)

        def handle_error(self, *_: Any) -> None:
            """Nothing: clients leave early."""

    with Server(("127.0.0.1", 0), Handler) as server:
        host = PictureHost(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield host
        finally:
            host.gate.set()
            server.shutdown()
            thread.join(PATIENCE)
