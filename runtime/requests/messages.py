"""Chat messages made plain for a chat template: their text parts joined, whatever form a client sends them in."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted

Message = Mapping[str, Any]


def joined(messages: Sequence[Message], place: str = "messages") -> list[Message]:
    """The messages with every content as one text. Raises BadRequest for a part that is no text.

    Most templates print a list of parts as Python spells it, or leave it out.
    """
    return [_message(f"{place}.{at}.content", message) for at, message in enumerate(messages)]


def _message(place: str, message: Message) -> Message:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{place}: must be a text or a list of parts, received {quoted(content)}")
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"{place}.{at}: must be a part of type text, received {quoted(part)}; this model reads text"
            )
    return {**message, "content": "".join(part["text"] for part in content)}
