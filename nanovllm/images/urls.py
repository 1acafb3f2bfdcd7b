"""URLs of images: data in them, and files of this machine and hosts that callers allow."""

import base64
import binascii
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # RFC 3986; a single letter is a drive
HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
REMOTE = ("http", "https")
DOMAINS = "allowed_media_domains"
BLANK = b" \t\r\n\f\v"  # bytes that may stand in base64
MAX_SHOWN = 120  # characters of a path or URL in errors


class Media:
    """The images that messages may name by strings.

    Args:
        allowed_path: folder whose files may be named; "": none.
        fetch: function of a URL of http or https and its name in errors, such as `Fetcher.fetch`;
            None: nothing is fetched.

    Attributes:
        fetches: whether `find` may wait for a host.
    """

    def __init__(self, allowed_path: str, fetch: Callable[[str, str], bytes] | None = None) -> None:
        self._folder = Path(allowed_path).resolve() if allowed_path else None
        self._fetch, self.fetches = fetch, fetch is not None

    def find(self, named: str, name: str) -> Any:
        """The image of a URL or path, for `open_picture`. That of a host is fetched here, so
        callers are threads that may wait; see `Fetcher` for bounds.

        Args:
            named: data URL, file URL, path, or URL of http or https.
            name: name of the argument in errors.

        Raises:
            ValueError: if it must not be read or fetched, or did not come.
        """
        kind = scheme(named)
        if kind == "data":
            return named
        if kind in REMOTE:
            if self._fetch is not None:
                return self._fetch(named, name)
            raise ValueError(
                f"`{name}` must be a data URL or a file, got {short(named)}: nothing is fetched "
                f"from the network, unless LLM() gets the names of its hosts in {DOMAINS}"
            )
        if kind not in ("", "file"):
            raise ValueError(
                f"`{name}` must be a data URL, a file, or a URL of http or https, got "
                f"{short(named)}: download it"
            )
        path = Path(path_of_url(named, name) if kind else named)
        if self._folder is None:
            raise ValueError(
                f"`{name}` names a file, {short(named)}: pass allowed_local_media_path to LLM(), "
                "a folder whose files messages may name"
            )
        try:
            inside = path.resolve().is_relative_to(self._folder)  # also where a link leads
        except (OSError, ValueError, RuntimeError) as error:  # no path, or links in a circle
            raise ValueError(f"`{name}` cannot be read: {short(named)}: {error}") from None
        if not inside:
            raise ValueError(
                f"`{name}` must be a file below `allowed_local_media_path` ({self._folder}), got "
                f"{short(named)}"
            )
        return path


def read_folder(path: Any) -> str:
    """The value of `allowed_local_media_path` as a string.

    Raises:
        TypeError, ValueError: if it is no folder.
    """
    name = "allowed_local_media_path"
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'`{name}` must be the path of a folder, or "", got {path!r}')
    folder = os.fspath(path)
    if folder and not os.path.isdir(folder):
        raise ValueError(f"`{name}` must be a folder that exists, got {folder!r}")
    return os.path.abspath(folder) if folder else ""


def read_domains(domains: Any) -> tuple[str, ...]:
    """The value of `allowed_media_domains`, in small letters.

    Raises:
        TypeError, ValueError: if these are no names of hosts.
    """
    given = () if domains is None else domains
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f'`{DOMAINS}` must be a list of hosts, ["example.org"], got {given!r}')
    found = []
    for domain in given:
        if not isinstance(domain, str):
            raise TypeError(f"`{DOMAINS}` must hold names of hosts, got {domain!r}")
        name = domain.lower()
        if not HOST.fullmatch(name) and not _is_address(name):
            raise ValueError(
                f"`{DOMAINS}` must hold names of hosts without scheme, port, path or *, in ASCII, "
                f"got {domain!r}"
            )
        found.append(name)
    return tuple(found)


def _is_address(text: str) -> bool:
    """Whether this is the address of a machine; those of IPv6 have colons."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def scheme(text: str) -> str:
    """The scheme of a URL, in small letters; "" if the text is none."""
    found = SCHEME.match(text)
    return found[1].lower() if found else ""


def is_remote(text: str) -> bool:
    """Whether a text is a URL of http or https."""
    return scheme(text) in REMOTE


def data_of_url(url: str, name: str) -> bytes:
    """The data in a `data:` URL (RFC 2397). `name` stands for it in errors.

    Raises:
        ValueError: if there are none.
    """
    kind, comma, data = url.partition(",")
    if not comma or not data:
        raise ValueError(f"`{name}` must have data after a comma, got {short(url)}")
    found = unquote_to_bytes(data)
    if not kind.endswith(";base64"):
        return found
    try:
        return base64.b64decode(found.translate(None, BLANK), validate=True)
    except binascii.Error as error:
        raise ValueError(f"`{name}` must be valid base64, got {short(url)} ({error})") from None


def path_of_url(url: str, name: str) -> str:
    """The path in a `file:` URL. `name` stands for it in errors.

    Raises:
        ValueError: if it names another machine, or is no URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets that make no sense
        raise ValueError(f"`{name}` must be a URL, got {short(url)}: {error}") from None
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"`{name}` must be a file of this machine, got {short(url)}")
    return url2pathname(parts.path)


# -- kinds of pictures --------------------------------------------------------------------------


def short(text: str) -> str:
    """A path or URL in quotes, the beginning of a long one."""
    return repr(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")
