"""Chat messages as OpenAI's clients send them: what may stand in one."""

from collections.abc import Sequence
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.runtime.requests.messages import Message

_MEANING = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_EMPTY = ("refusal", "audio", "function_call", "annotations")  # of an answer that is sent back


def read(given: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages without what is null. Raises BadRequest."""
    return [_message(f"messages.{at}", message) for at, message in enumerate(given)]


def _message(place: str, message: dict[str, Any]) -> Message:
    for name, value in message.items():
        if name not in _MEANING and not (name in _EMPTY and not value):
            raise BadRequest(f"{place}.{name}: is not supported, received {quoted(value)}; leave it out")
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{place}.role: must be a text, received {quoted(message.get('role'))}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRequest(f"{place}.content: is required and missing")
    plain = {name: value for name, value in message.items() if name in _MEANING and value is not None}
    return {"content": ""} | plain
