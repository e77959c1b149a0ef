"""What went wrong, in OpenAI's form: a status, and ``{"error": {message, type, param, code}}``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.errors import BadRequest, Closed, ProcessLost, QueueFull, TandemError, named

RETRY_AFTER_S = 1


class UnknownModel(TandemError):
    """A request names a model that is not served."""


class BadKey(TandemError):
    """The server has a key and the request does not."""


class TooLarge(TandemError):
    """A request's body is over the server's limit."""


class TooSlow(TandemError):
    """A request's body did not come in time."""


class TimedOut(TandemError):
    """The time that a request allowed ran out before the first token."""


class Cancelled(TandemError):
    """A request was ended from inside: the server is closing."""


class Gone(TandemError):
    """The client closed the connection; nobody reads the answer."""


@dataclass(frozen=True)
class Form:
    """How one kind of error is answered: the HTTP status, and OpenAI's words for it."""

    status: int
    kind: str
    code: str | None = None


_FORMS: Mapping[type[BaseException], Form] = {
    BadRequest: Form(400, "invalid_request_error"),
    UnknownModel: Form(404, "invalid_request_error", "model_not_found"),
    BadKey: Form(401, "invalid_request_error", "invalid_api_key"),
    TooLarge: Form(413, "invalid_request_error", "request_too_large"),
    TooSlow: Form(408, "invalid_request_error", "request_timeout"),
    QueueFull: Form(429, "rate_limit_error", "queue_full"),
    TimedOut: Form(504, "server_error", "timeout"),
    Gone: Form(499, "invalid_request_error", "client_closed_request"),
    Closed: Form(503, "server_error", "closed"),
    Cancelled: Form(503, "server_error", "closed"),
    ProcessLost: Form(503, "server_error", "process_lost"),
}
_INTERNAL = Form(500, "server_error", "internal_error")
_PARAM = re.compile(r"([A-Za-z_][\w.]*): ")


def form(error: BaseException) -> Form:
    """Return how ``error`` is answered; what is nobody's fault but ours is status 500."""
    return next((_FORMS[kind] for kind in type(error).__mro__ if kind in _FORMS), _INTERNAL)


def body(error: BaseException) -> dict[str, Any]:
    """Return the body that says ``error``; ``param`` is the field that its message begins with, if it does."""
    message = str(error) if isinstance(error, TandemError) else named(error)
    known = form(error)
    found = _PARAM.match(message) if known.status == 400 else None
    return said(message, known.kind, known.code, found[1] if found else None)


def said(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers(error: BaseException) -> dict[str, str]:
    """Return the headers that belong to ``error``: when to come again, how to say who one is."""
    if isinstance(error, QueueFull):
        return {"Retry-After": str(RETRY_AFTER_S)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, BadKey) else {}
