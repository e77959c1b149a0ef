"""Input items of /v1/responses as chat messages.

The items of one assistant turn (reasoning, text, calls) become one message, as chat templates expect it.
"""

from collections.abc import Mapping
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.requests.images import base64_url

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_IMAGE_FIELDS = {  # of each type of part that holds an image; a file has to be one
    "input_image": ("type", "image_url", "detail", "prompt_cache_breakpoint"),
    "input_file": ("type", "file_data", "file_url", "filename", "detail", "prompt_cache_breakpoint"),
}
_FIELDS = {  # of each type of item, and those that answers have and that change no prompt
    "message": ("role", "content", "id", "status", "phase"),
    "function_call": ("call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("call_id", "output", "id", "status"),
    "reasoning": ("content", "summary", "encrypted_content", "id", "status"),
}


def as_messages(items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    """Return the messages of a chat: ``instructions`` as a system message, then a text or items. Raises BadRequest."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise BadRequest(f"input: must be a text or a non-empty list of items, received {quoted(items)}")
    turn: dict[str, Any] | None = None  # the assistant's message that the next items continue
    for at, item in enumerate(items):
        message = _message(f"input.{at}", item)
        if message["role"] != "assistant":
            turn = None
        elif turn is not None:
            _join(turn, message)
            continue
        else:
            turn = message
        messages.append(message)
    return messages


def _message(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as a message of its own."""
    kind = item.get("type")
    kind = "message" if kind is None else kind
    if kind not in tuple(_FIELDS):  # it may be unhashable
        raise BadRequest(f"{place}.type: must be one of {', '.join(_FIELDS)}, received {quoted(kind)}; leave it out")
    for name, value in item.items():
        if name not in ("type", *_FIELDS[kind]) and value is not None:
            raise BadRequest(f"{place}.{name}: is no field of a {kind}, received {quoted(value)}; leave it out")
    if kind == "function_call":
        function = {"name": _text(place, item, "name"), "arguments": _text(place, item, "arguments")}
        call = {"id": _text(place, item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(f"{place}.output", item.get("output"), images=True)
        return {"role": "tool", "tool_call_id": _text(place, item, "call_id"), "content": content}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(place, item)}
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{place}.role: must be one of {', '.join(_ROLES)}, received {quoted(role)}")
    return {"role": role, "content": _content(f"{place}.content", item.get("content"), images=role == "user")}


def _content(place: str, content: Any, *, images: bool) -> str | list[dict[str, Any]]:
    """Return a content as text, or as parts of a chat message if it has images."""
    if not images or not isinstance(content, list) or not any(map(_is_image, content)):
        return _joined(place, content)
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        here = f"{place}.{at}"
        if not _is_image(part):
            parts.append({"type": "text", "text": _part_text(here, part)})
            continue
        for name, value in part.items():
            if name not in _IMAGE_FIELDS[part["type"]] and value is not None:
                raise BadRequest(f"{here}.{name}: is no field of an image here, received {quoted(value)}; leave it out")
        detail = {} if part.get("detail") is None else {"detail": part["detail"]}
        parts.append({"type": "image_url", "image_url": {"url": _url(here, part), **detail}})
    return parts


def _url(place: str, part: Mapping[str, Any]) -> str:
    if part["type"] == "input_image":
        return _text(place, part, "image_url")
    if part.get("file_url") is not None:
        return _text(place, part, "file_url")
    return base64_url(_text(place, part, "file_data"))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in tuple(_IMAGE_FIELDS)  # a type may be unhashable


def _reasoning(place: str, item: Mapping[str, Any]) -> str:
    content, summary = item.get("content"), item.get("summary")
    if not content and not summary and item.get("encrypted_content"):
        raise BadRequest(f"{place}.encrypted_content: must come with content, because the server cannot decrypt it")
    return _joined(f"{place}.content", content or summary or [])


def _join(turn: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Append a message of the assistant to the message before it."""
    for name in ("content", "reasoning_content"):
        if name in message:
            turn[name] = turn.get(name, "") + message[name]
    if "tool_calls" in message:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *message["tool_calls"]]


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name}: must be a text, received {quoted(value)}")
    return value


def _joined(place: str, content: Any) -> str:
    """Return the text of a content: a text, or a list of text parts. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place}: must be a text or a list of parts, received {quoted(content)}")
    return "".join(_part_text(f"{place}.{at}", part) for at, part in enumerate(content))


def _part_text(place: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise BadRequest(
            f"{place}: must be a part of text (input_text or output_text), or an image (input_image, input_file) of "
            "a user or a tool, "
            f"received {quoted(part)}"
        )
    return str(part["text"])
