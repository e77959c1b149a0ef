"""Chat messages as OpenAI's clients send them, made plain for a chat template."""

from collections.abc import Sequence
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.runtime.requests.prompt import Message

_MEANING = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_EMPTY = ("refusal", "audio", "function_call", "annotations")  # of an answer that is sent back


def read(given: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages with their parts of text joined and without what is null. Raises BadRequest."""
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
    return plain | {"content": _text(f"{place}.content", content)}


def _text(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place}: must be a text or a list of parts, received {quoted(content)}")
    for at, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"{place}.{at}: must be a part of type text, received {quoted(part)}; this model reads text"
            )
    return "".join(part["text"] for part in content)
