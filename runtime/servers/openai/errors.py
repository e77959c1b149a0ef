"""Map errors to OpenAI error responses: an HTTP status and ``{"error": {message, type, param, code}}``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from tandemrt.engines.validation.errors import (
    BadRequest,
    Closed,
    ContextLengthExceeded,
    ProcessLost,
    QueueFull,
    TandemError,
    named,
)
from tandemrt.runtime.servers.openai.field_names import FIELD
from tandemrt.runtime.servers.request_stream import RequestCancelled, RequestTimeout

RETRY_AFTER_S = 1


class UnknownModel(TandemError):
    """A request names a model that is not served."""


class UnknownObject(TandemError):
    """A request names a file or a batch that its key did not create."""


class UnsupportedEndpoint(TandemError):
    """A request is for an endpoint of OpenAI's that this server does not have."""


class InvalidApiKey(TandemError):
    """The server has an API key and the request does not have it."""


class UnknownHost(TandemError):
    """A request is for a host name that is not this server's."""


class UnsupportedMediaType(TandemError):
    """The body of a request is not announced as JSON."""


class BodyTooLarge(TandemError):
    """The body of a request exceeds the server's limit."""


class BodyTimeout(TandemError):
    """The body of a request did not arrive in time."""


class HeaderTimeout(TandemError):
    """The head of a request did not arrive in time."""


class Overloaded(TandemError):
    """The server holds as many connections or bytes of requests as it may."""


class ClientDisconnected(TandemError):
    """The client closed the connection before the response."""


@dataclass(frozen=True)
class ErrorStatus:
    """HTTP status, OpenAI error type and error code of one kind of error."""

    status: int
    type: str
    code: str | None = None


_STATUSES: Mapping[type[BaseException], ErrorStatus] = {
    BadRequest: ErrorStatus(400, "invalid_request_error"),
    ContextLengthExceeded: ErrorStatus(400, "invalid_request_error", "context_length_exceeded"),
    UnknownModel: ErrorStatus(404, "invalid_request_error", "model_not_found"),
    UnknownObject: ErrorStatus(404, "invalid_request_error"),
    UnsupportedEndpoint: ErrorStatus(404, "invalid_request_error", "unsupported_endpoint"),
    InvalidApiKey: ErrorStatus(401, "invalid_request_error", "invalid_api_key"),
    UnknownHost: ErrorStatus(403, "invalid_request_error", "unknown_host"),
    UnsupportedMediaType: ErrorStatus(415, "invalid_request_error", "unsupported_media_type"),
    BodyTooLarge: ErrorStatus(413, "invalid_request_error", "request_too_large"),
    BodyTimeout: ErrorStatus(408, "invalid_request_error", "request_timeout"),
    HeaderTimeout: ErrorStatus(408, "invalid_request_error", "request_timeout"),
    Overloaded: ErrorStatus(503, "server_error", "overloaded"),
    QueueFull: ErrorStatus(429, "rate_limit_error", "queue_full"),
    RequestTimeout: ErrorStatus(504, "server_error", "timeout"),
    ClientDisconnected: ErrorStatus(499, "invalid_request_error", "client_closed_request"),
    Closed: ErrorStatus(503, "server_error", "closed"),
    RequestCancelled: ErrorStatus(503, "server_error", "closed"),
    ProcessLost: ErrorStatus(503, "server_error", "process_lost"),
}
_INTERNAL = ErrorStatus(500, "server_error", "internal_error")


def status_of(error: BaseException) -> ErrorStatus:
    """Return the status of ``error``; 500 for an error that the client did not cause."""
    return next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), _INTERNAL)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the response body for ``error``. ``param`` is the field name at the start of its message, if any."""
    message = str(error) if isinstance(error, TandemError) else named(error)
    known = status_of(error)
    match = FIELD.match(message) if known.status in (400, 404) else None
    return error_object(message, known.type, known.code, match[1] if match else None)


def error_response(
    error: BaseException,
    headers: Mapping[str, str] | None = None,
    body: Callable[[BaseException], dict[str, Any]] = error_body,
) -> Response:
    """Return the HTTP response for ``error``. ``body`` returns its body."""
    return json_response(body(error), status_of(error).status, error_headers(error) | dict(headers or {}))


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return ``body`` as JSON."""
    # In ASCII, because quoted values may contain lone surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def error_object(message: str, error_type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the response headers for ``error``: Retry-After or WWW-Authenticate."""
    if isinstance(error, QueueFull | Overloaded):
        return {"Retry-After": str(RETRY_AFTER_S)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, InvalidApiKey) else {}
