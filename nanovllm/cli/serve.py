"""Answer programs that speak OpenAI's protocol, over HTTP.

    nanovllm serve Qwen/Qwen3-0.6B

listens on http://127.0.0.1:8000/v1. Without MODEL it serves the small one of the package. It needs
the extra `serve`. Endpoints: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models,
/tokenize, /detokenize, /health, /version, /metrics.

Ctrl-C or SIGTERM lets it drain: new requests are refused, open ones get their answers. A second
signal ends it at once.
"""

import argparse
import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path

from nanovllm import TINY
from nanovllm.cli.options import add_engine_options, engine_options, number, positive

KEY = "NANOVLLM_API_KEY"  # variable of the environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory of a checkpoint, or its name on the hub",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)"
    )
    parser.add_argument(
        "--port",
        type=port,
        default=8000,
        metavar="N",
        help="port to listen on; 0: a free one (8000)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="K",
        help="key that requests must have in a header `Authorization: Bearer K`; again for more "
        f"(that of the variable {KEY}, which other users of the machine cannot see, and which is "
        "not read beside this option)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in requests and answers; again for more (MODEL)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        default=1024,
        metavar="N",
        help="sequences that may wait for their first token; others get the status 429 (1024)",
    )
    parser.add_argument(
        "--stream-interval",
        type=positive,
        default=1,
        metavar="N",
        help="tokens that make a piece of a stream, after the first (1); more take less of a CPU",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=20.0,
        metavar="SECONDS",
        help="time that open requests have at the end (20)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    try:
        from nanovllm.serve.app import make_app
        from nanovllm.serve.server import Server, bind
    except ImportError as error:
        raise ValueError(
            f'the package {error.name} is missing: pip install "nanovllm[serve]" (".[serve]" in a '
            "clone)"
        ) from None
    given = args.api_key or [key for key in [os.environ.get(KEY)] if key]
    keys = [key.strip() for key in given]  # a file's newline at its end, say
    if not all(keys):
        raise ValueError(f"`{'--api-key' if args.api_key else KEY}` must not be empty or blank")
    if not all(args.served_model_name or ["any"]):
        raise ValueError("`--served-model-name` must not be empty, got ''")
    if not args.host:
        raise ValueError("`--host` must not be empty, got '': 0.0.0.0 is any address")
    if not keys and not is_loopback(args.host):
        print(
            f"nanovllm serve: anyone who reaches {args.host} may use it: pass --api-key",
            file=sys.stderr,
        )
    names = args.served_model_name or [args.model or Path(TINY).name]
    with bind(args.host, args.port) as listener:
        print(f"nanovllm serve: loading {args.model or TINY}", file=sys.stderr, flush=True)
        from nanovllm import AsyncLLM

        llm = AsyncLLM(args.model or TINY, **engine_options(args))
        try:
            app = make_app(
                llm,
                names,
                keys=keys,
                hosts=() if keys else names_of(args.host),
                max_waiting=args.max_waiting,
                interval=args.stream_interval,
            )
            Server(app, listener, args.grace, f"nanovllm serve: {names[0]} at").listen()
        finally:
            llm.exit()
    return 0


def port(text: str) -> int:
    """A port's number."""
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be between 0 and 65535, got {text!r}")
    return value


def seconds(text: str) -> float:
    """A time that is not negative."""
    value = number(text)
    if not value >= 0:  # nor nan
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_of(host: str) -> tuple[str, ...]:
    """The names by which a server of this machine alone may be called; none: any."""
    if not is_loopback(host):
        return ()
    return "localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host
