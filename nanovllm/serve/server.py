"""The server: listens, and drains when it is told to end."""

import gc
import socket
import sys
import time
from types import FrameType

import uvicorn

from nanovllm.serve.guard import Guard

KEEP_ALIVE = 60  # seconds; clients that keep connections for less never meet a closed one


class Server(uvicorn.Server):
    """A server of one application. The first signal (Ctrl-C, SIGTERM) lets it drain: new requests
    are refused, and it ends when the others have their answers, after `grace` seconds at the
    latest. A second signal ends it at once.

    Args:
        app: application.
        listener: socket that listens; connections made before the server runs wait in its backlog.
        grace: seconds for requests that are open.
        greeting: line on standard error when the server runs, before its address.
    """

    def __init__(self, app: Guard, listener: socket.socket, grace: float, greeting: str) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._app, self._listener, self._grace = app, listener, grace
        self._greeting, self._ends_at = greeting, float("inf")
        self._has_said = False  # that it drains

    def listen(self) -> None:
        """Serve until a signal."""
        gc.collect()
        gc.freeze()  # the engine's objects: each search through them takes a tenth of a second
        self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer, and say so."""
        await super().startup(sockets)
        print(f"{self._greeting} http://{address_of(self._listener)}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, or end at the second signal."""
        grace = 0.0 if self._app.is_draining else self._grace
        self._app.is_draining, self._ends_at = True, time.monotonic() + grace

    def _say(self) -> None:
        """Say once that open requests are waited for; not in a handler of signals, which may be in
        the middle of other output.
        """
        if not self._has_said and (num_open := self._app.num_open):
            print(
                f"nanovllm serve: open requests ({num_open}) are answered first, for at most "
                f"{self._grace:g} seconds; a second signal ends them",
                file=sys.stderr,
                flush=True,
            )
        self._has_said = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; asked ten times a second."""
        if self._app.is_draining:
            self._app.stop_reading()
            self._say()
        is_late = time.monotonic() > self._ends_at
        if is_late:
            self._app.stop()
        is_done = self._app.is_draining and not self._app.num_open
        return await super().on_tick(counter) or is_done or is_late


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address: before a model is loaded, so that no other server can
    have the address meanwhile (bound sockets that do not listen may share one).

    Raises:
        ValueError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(
            f"`--host` and `--port` must be an address of this machine that is free, got {host} "
            f"and {port}: {error}"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """The address of a socket, as it stands in a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
