"""Errors as a client is told them, and whose fault they are: a client's mistake has a sentence
about it; a fault of ours has the id of the request, for the log, where paths and addresses may be.
"""

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse

from nanovllm.openai.answers import DONE, dumps
from nanovllm.openai.bodies import as_sent
from nanovllm.outputs import EmbeddingRequestOutput, Mistake, RequestOutput

logger = logging.getLogger(__name__)

DEAD = "the engine has failed: see the server's log"
INTERNAL = "internal error: the log of the server has more about request {}"
RETRY_SECONDS = 1
MAX_MESSAGE = 1000  # characters
NAMES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RefusedError(Exception):
    """A request that is answered by an error, with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def mistakes(names: Collection[str] = ()) -> Iterator[None]:
    """Errors about what a client has passed, as his mistakes; others are faults of ours. `names`
    are those of the body's fields, if errors have names of parameters.
    """
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:  # the last for a missing package
        message = as_sent(str(error), names)
        raise RefusedError(400, message) from error
    except RecursionError as error:
        raise RefusedError(400, "a field of the body is nested too deeply") from error


def raise_error(output: RequestOutput | EmbeddingRequestOutput) -> None:
    """Raise the error of an output that has one. Images are read late, so a mistake comes so."""
    if isinstance(output.error, Mistake):
        raise RefusedError(400, output.error)
    if output.error is not None:
        raise RuntimeError(output.error)


def told(message: str) -> str:
    """A message without what may be in a value of a client: any number of characters, and
    surrogates, which no encoding knows.
    """
    return message[:MAX_MESSAGE].encode(errors="replace").decode()


def error_body(status: int, message: str) -> dict[str, Any]:
    """OpenAI's object for an error, with the values of vLLM; `param` is the field that is named."""
    named = re.match(r"`([\w.]+)", message)
    kind = NAMES.get(status, NAMES[400])
    param = named[1] if named else None
    return {"error": {"message": told(message), "type": kind, "param": param, "code": status}}


def log_refusal(request_id: str, refused: RefusedError) -> None:
    """Log why a request is refused."""
    logger.info("request %s is refused (%d): %s", request_id, refused.status, told(str(refused)))


def error_response(status: int, message: str) -> JSONResponse:
    """An error as a response."""
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (413, 503):
        headers["Connection"] = "close"
    return JSONResponse(error_body(status, message), status, headers)


def last_events(status: int, message: str) -> str:
    """An error as the end of a stream of events."""
    return f"data: {dumps(error_body(status, message))}\n\n{DONE}"
