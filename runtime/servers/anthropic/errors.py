"""Errors in Anthropic's form."""

from typing import Any

from tandemrt.runtime.servers.openai.errors import error_body, status_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """Return the response body for ``error``, which is also the event for it in a stream."""
    kind = _TYPES.get(status_of(error).status, "api_error")
    return {"type": "error", "error": {**error_body(error)["error"], "type": kind}}
