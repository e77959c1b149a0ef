"""Validate chat messages in the form that OpenAI clients send."""

from collections.abc import Sequence
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.requests.prompt import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SUPPORTED = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_ACCEPTED_EMPTY = ("refusal", "audio", "function_call", "annotations")  # clients send answers back with these


def parse_messages(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages without null fields. Raises BadRequest."""
    return [_message(f"messages.{at}", message) for at, message in enumerate(messages)]


def _message(place: str, message: dict[str, Any]) -> Message:
    for name, value in message.items():
        if value is not None and name not in _SUPPORTED and not (name in _ACCEPTED_EMPTY and not value):
            raise BadRequest(f"{place}.{name}: is not supported, received {quoted(value)}; leave it out")
    if message.get("role") not in ROLES:
        raise BadRequest(f"{place}.role: must be one of {', '.join(ROLES)}, received {quoted(message.get('role'))}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRequest(f"{place}.content: is required and missing")
    fields = {name: value for name, value in message.items() if name in _SUPPORTED and value is not None}
    return {"content": ""} | fields
