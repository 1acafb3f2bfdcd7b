"""`Fetcher`: images over HTTP and HTTPS, from hosts that the engine's owner allows.

The URL alone decides what is asked: the host is connected to by its name, without a proxy of the
environment, and gets no cookies and no credentials. Imports no torch.
"""

import http.client
import io
import socket
import ssl
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from nanovllm.images.urls import DOMAINS, short

MAX_BYTES = 64 << 20
SECONDS = 20.0
MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
UNQUOTED = "/%:@!$&'()*+,;=~?"  # of a path and a query, beside letters, digits and _.-


class Fetcher:
    """Asks hosts for images.

    An image has at most `MAX_BYTES` (64 MiB) and comes within `SECONDS` (20), in which everything
    has to happen: connections, redirects, and the last byte. (The resolver of names has limits of
    its own.)

    Args:
        domains: hosts that may be asked, from `read_domains`; at any port.
    """

    def __init__(self, domains: tuple[str, ...]) -> None:
        self._domains = domains
        self._context = ssl.create_default_context()

    def fetch(self, url: str, name: str) -> bytes:
        """The body of the answer to GET, whatever it is.

        Args:
            url: URL with the scheme http or https.
            name: name of the argument in errors.

        Raises:
            ValueError: if it must not be fetched, or did not come.
        """
        deadline, asked = time.monotonic() + SECONDS, url
        for _ in range(MAX_REDIRECTS + 1):
            place = self._check(asked, url, name)
            try:
                answer = self._get(place, deadline)
            except TimeoutError:
                raise ValueError(
                    f"`{name}` must come within {SECONDS:g} seconds, got {short(url)}, which takes "
                    "longer: download it"
                ) from None
            except (OSError, _UnwantedError) as error:
                raise ValueError(f"`{name}` cannot be fetched: {short(url)}: {error}") from None
            except http.client.HTTPException as error:  # whose text may be the host's
                raise ValueError(
                    f"`{name}` cannot be fetched: {short(url)}: {type(error).__name__}"
                ) from None
            if isinstance(answer, bytes):
                return answer
            asked = urljoin(asked, answer)
        raise ValueError(
            f"`{name}` must take at most {MAX_REDIRECTS} redirects, got {short(url)} with more"
        )

    def _check(self, asked: str, url: str, name: str) -> SplitResult:
        """The parts of a URL: the caller's, or one to which that has led."""
        got = short(asked) if asked == url else f"{short(asked)}, a redirect from {short(url)}"
        try:
            place = urlsplit(asked)
            port = place.port
        except ValueError as error:  # brackets or a port that make no sense
            raise ValueError(f"`{name}` must be a URL, got {got}: {error}") from None
        if place.scheme not in ("http", "https") or port == 0:
            raise ValueError(f"`{name}` must be a URL of http or https, got {got}")
        if "@" in place.netloc:
            raise ValueError(
                f"`{name}` must have no user or password in its URL, which no host gets from here: "
                "download it"
            )
        if place.hostname not in self._domains:
            raise ValueError(
                f"`{name}` must be of a host in `{DOMAINS}` ({', '.join(self._domains)}), got {got}"
            )
        return place

    def _get(self, place: SplitResult, deadline: float) -> bytes | str:
        """The body of a host's answer, or the URL to which it leads."""
        host, is_secure = str(place.hostname), place.scheme == "https"
        port = place.port or (443 if is_secure else 80)
        target = (place.path or "/") + (f"?{place.query}" if place.query else "")
        connection = (
            http.client.HTTPSConnection(host, port, context=self._context)
            if is_secure
            else http.client.HTTPConnection(host, port)
        )
        with ExitStack() as stack:
            opened = stack.enter_context(_connect(host, port, deadline))
            if is_secure:
                opened.settimeout(_left(deadline))  # of the whole handshake
                secure = self._context.wrap_socket(opened, server_hostname=host)
                opened = stack.enter_context(secure)
            timed: Any = _TimedSocket(opened, deadline)
            connection.sock = timed
            headers = {"User-Agent": "nanovllm", "Connection": "close"}
            connection.request("GET", quote(target, safe=UNQUOTED), headers=headers)
            response = connection.getresponse()
            if response.status in REDIRECTS and (leads := response.getheader("Location")):
                return leads
            if response.status != 200:
                reason = http.client.responses.get(response.status, "")
                raise _UnwantedError(f"the answer is {response.status} {reason}".rstrip())
            return _read(response)


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body of an answer."""
    too_large = _UnwantedError(f"it has more than {MAX_BYTES:,} bytes")
    if (response.length or 0) > MAX_BYTES:
        raise too_large
    body = response.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise too_large
    if response.length:
        raise _UnwantedError(f"it breaks off {response.length:,} bytes before its end")
    return body


class _UnwantedError(Exception):
    """An answer that is not the image."""


def _left(deadline: float) -> float:
    """The time until a deadline in seconds; TimeoutError if there is none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to a host, at the first of its addresses that answers."""
    failure: OSError = OSError("it has no address")
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(places):
        found = socket.socket(family, kind, protocol)
        try:
            found.settimeout(_left(deadline) / (len(places) - number))
            found.connect(address)
            return found
        except OSError as error:
            found.close()
            failure = error
    raise failure


class _TimedSocket:
    """A connection for `http.client`, of which everything ends by a deadline. A timeout of the
    socket alone would begin anew with each byte.
    """

    def __init__(self, opened: socket.socket, deadline: float) -> None:
        self._opened, self._deadline = opened, deadline

    def sendall(self, data: bytes) -> None:
        self._opened.settimeout(_left(self._deadline))
        self._opened.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReads(self._opened, self._deadline))

    def close(self) -> None:
        """Nothing: the opener of the connection closes it, after the body."""


class _TimedReads(io.RawIOBase):
    """The bytes that come over a connection until a deadline."""

    def __init__(self, opened: socket.socket, deadline: float) -> None:
        self._opened, self._deadline = opened, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._opened.settimeout(_left(self._deadline))
        return self._opened.recv_into(buffer)
