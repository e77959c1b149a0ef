"""Errors in Anthropic's form."""

from typing import Any

from tandemrt.engines.validation.errors import ContextLengthExceeded
from tandemrt.runtime.servers.openai.errors import error_body, status_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """Return the response body for ``error``, which is also the event for it in a stream."""
    kind = _TYPES.get(status_of(error).status, "api_error")
    body = error_body(error)["error"]
    if isinstance(error, ContextLengthExceeded):
        body["message"] = _too_long(error)
    return {"type": "error", "error": {**body, "type": kind}}


def _too_long(error: ContextLengthExceeded) -> str:
    """Return Anthropic's message, by which its clients know to shorten the chat or to ask for less."""
    if error.max_tokens:
        return (
            f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens} > "
            f"{error.length}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.length - 1} maximum"
