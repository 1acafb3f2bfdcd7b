"""`Guard`: keys, the size of a body, and a watch for the client's leaving, for every request.

Plain ASGI, because Starlette's own base for middleware hides disconnections.
"""

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.serve.errors import RefusedError, error_response, last_events, log_refusal

MAX_BODY = 32 << 20  # bytes
OPEN_PATHS = ("/health",)  # need no key
DRAINING_PATHS = ("/metrics",)  # answer while the server drains
ENDING = "the server is about to end"
TOO_LARGE = "a body must have at most {:,} bytes"
REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)


class Guard:
    """The way to an application.

    Args:
        app: application; its requests have their whole body at once, and `state.request_id`.
        keys: keys of which a request must have one; none: it needs none.
        hosts: names by which a request may call the server in its header `Host`, with any port;
            none: any. Without keys they keep out web pages of others, whose own name may be made to
            lead to this machine.

    Attributes:
        is_draining: whether new requests are refused.
        num_open: requests that have no whole answer yet.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._digests = [_digest(key.encode(errors="surrogateescape")) for key in keys]
        self.is_draining, self.num_open = False, 0
        self._watches: set[asyncio.Future[None]] = set()  # of clients with open requests
        self._readers: set[asyncio.Future[bytes | None]] = set()  # of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(own_id):
            own_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = own_id
        has_begun = is_stream = has_ended = False

        async def send_id(message: Message) -> None:
            nonlocal has_begun, is_stream, has_ended
            if message["type"] == "http.response.start":
                has_begun = True
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = kind.startswith("text/event-stream")
                message["headers"] = [*message["headers"], (b"x-request-id", own_id.encode())]
            else:
                has_ended = not message.get("more_body", False)
            await send(message)

        self.num_open += 1
        try:
            body = await self._body(scope, headers, receive)
            if body is not None and not await self._run(scope, body, receive, send_id):
                raise RefusedError(503, ENDING)
        except RefusedError as refused:
            log_refusal(own_id, refused)
            if not has_begun:
                await error_response(refused.status, str(refused))(scope, receive, send_id)
            elif is_stream and not has_ended:
                events = last_events(refused.status, str(refused)).encode()
                await send_id({"type": "http.response.body", "body": events, "more_body": False})
        finally:
            self.num_open -= 1

    def stop_reading(self) -> None:
        """End requests whose bodies are not there yet."""
        for task in self._readers:
            task.cancel()

    def stop(self) -> None:
        """End all open requests."""
        for task in self._watches:
            task.cancel()

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes | None:
        """The body of a request that may pass; None if its client has gone."""
        path = scope["path"]
        self._check_host(headers)
        self._check_key(path, headers)
        if self.is_draining and path not in DRAINING_PATHS:
            raise RefusedError(503, ENDING)
        if scope["method"] in ("GET", "HEAD") or path in OPEN_PATHS:
            return b""  # any body is left unread
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BODY:
            raise RefusedError(413, TOO_LARGE.format(MAX_BODY))
        reader = asyncio.ensure_future(_read(receive))
        self._readers.add(reader)
        try:
            await asyncio.wait({reader})
        finally:
            self._readers.discard(reader)
            reader.cancel()
        if reader.cancelled():
            raise RefusedError(503, ENDING)
        return reader.result()

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if self._hosts and name not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise RefusedError(403, f"the header `Host` must be one of {known}, got {name!r}")

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._digests and path not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            digest = _digest(key.strip().encode("latin-1"))
            found = [hmac.compare_digest(digest, own) for own in self._digests]
            if kind.lower() != "bearer" or not any(found):
                raise RefusedError(
                    401, "the header `Authorization` must be `Bearer` and a valid key"
                )

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Run the application, and cancel it when the client goes. Returns whether it could go on
        until then.
        """

        async def give_body() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.ensure_future(self._app(scope, give_body, send))
        watch = asyncio.ensure_future(leave())
        self._watches.add(watch)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and "is_answered" not in scope["state"]:  # else the log has its error
                work.result()
            return work.done() or not watch.cancelled()
        finally:
            self._watches.discard(watch)
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)


def _digest(key: bytes) -> bytes:
    """A digest of a key: as long as any other's, and no part of the key."""
    return hashlib.sha256(key).digest()


async def _read(receive: Receive) -> bytes | None:
    """The body of a request; None if its client has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise RefusedError(413, TOO_LARGE.format(MAX_BODY))
        if not message.get("more_body", False):
            return bytes(body)
