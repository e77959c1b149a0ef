"""Messages of /v1/messages as chat messages: each result of a tool becomes a message of its own."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, quoted

_ROLES = ("user", "assistant", "system")
_NO_EFFECT = ("cache_control",)  # prefixes are always cached
_FIELDS = {  # of each type of block
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking", "signature"),  # thinking needs no proof here: nothing hides its text
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),  # templates know no errors of tools
    "tool_reference": ("tool_name",),  # the prompt describes all tools, so their names are enough
}
_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
Part = dict[str, Any]


def as_messages(items: Any, system: Any = None) -> list[dict[str, Any]]:
    """Return the messages of a chat, after ``system`` as its first. Raises BadRequest."""
    if not isinstance(items, list) or not items:
        raise BadRequest(f"messages: must be a non-empty list of messages, received {quoted(items)}")
    messages = [] if system is None else [{"role": "system", "content": _text("system", system)}]
    for at, message in enumerate(items):
        messages += _messages(f"messages.{at}", message)
    return messages


def _messages(place: str, message: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{place}: must be an object with role and content, received {quoted(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{place}.role: must be one of {', '.join(_ROLES)}, received {quoted(role)}")
    sent = [name for name, value in message.items() if value is not None]
    if unknown := next((name for name in sent if name not in ("role", "content")), None):
        raise BadRequest(f"{place}.{unknown}: is no field of a message; leave it out")
    place = f"{place}.content"
    blocks = list(_blocks(place, message.get("content"), _BLOCKS[role]))
    if role == "assistant":
        yield _assistant(place, blocks)
        return
    parts: list[Part] = []
    for at, block in enumerate(blocks):
        here = f"{place}.{at}"
        if block["type"] != "tool_result":
            parts.append(_part(here, block))
            continue
        if parts:
            yield {"role": role, "content": _joined(parts)}
            parts = []
        result = block.get("content")
        content = "" if result is None else _content(f"{here}.content", result)
        yield {"role": "tool", "tool_call_id": _string(here, block, "tool_use_id"), "content": content}
    if parts or not blocks:
        yield {"role": role, "content": _joined(parts)}


def _assistant(place: str, blocks: list[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for at, block in enumerate(blocks):
        here = f"{place}.{at}"
        if block["type"] == "text":
            message["content"] += block["text"]
        elif block["type"] == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(here, block, "thinking")
        else:
            if not isinstance(block.get("input"), Mapping):
                raise BadRequest(f"{here}.input: must be an object, received {quoted(block.get('input'))}")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": _string(here, block, "name"), "arguments": arguments}
            calls.append({"id": _string(here, block, "id"), "type": "function", "function": function})
    return message | ({"tool_calls": calls} if calls else {})


def _blocks(place: str, content: Any, types: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield the blocks of a content: a text, or a list of blocks of these types. Raises BadRequest."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{place}: must be a text or a list of blocks, received {quoted(content)}")
    for at, block in enumerate(content):
        here = f"{place}.{at}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in types:
            rule = f"must be a block of type {' or '.join(types)}"
            raise BadRequest(f"{here}: {rule}, received {quoted(block)}; leave it out")
        for name, value in block.items():
            if name not in ("type", *_FIELDS[kind], *_NO_EFFECT) and value is not None:
                raise BadRequest(f"{here}.{name}: is no field of a block {kind}, received {quoted(value)}")
        if kind == "text":
            _string(here, block, "text")
        yield block


def _content(place: str, content: Any) -> str | list[Part]:
    """Return the result of a tool as the content of a chat message."""
    blocks = _blocks(place, content, ("text", "image", "tool_reference"))
    return _joined([_part(f"{place}.{at}", block) for at, block in enumerate(blocks)])


def _part(place: str, block: Mapping[str, Any]) -> Part:
    """Return a block of text, of an image, or of a tool's name, as a part of a chat message."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "tool_reference":
        return {"type": "text", "text": _string(place, block, "tool_name") + "\n"}
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": _string(f"{place}.source", source, "url")}}
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise BadRequest(
            f"{place}.source: must have type base64, media_type and data, or type url and url, received "
            f"{quoted(source)}"
        )
    media, data = (_string(f"{place}.source", source, name) for name in ("media_type", "data"))
    return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}


def _joined(parts: list[Part]) -> str | list[Part]:
    """Return text parts as one text; parts with images as they are."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _text(place: str, content: Any) -> str:
    return "".join(block["text"] for block in _blocks(place, content, ("text",)))


def _string(place: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name}: must be a text, received {quoted(value)}")
    return value
