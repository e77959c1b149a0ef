"""Chat messages made plain for a chat template: their text parts joined, whatever form a client sends them in."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandemrt.engines.control_tokens import MARKS
from tandemrt.engines.errors import BadRequest, quoted

Message = Mapping[str, Any]
_END = MARKS[-2] * 2  # of a message that is to be continued


def joined(messages: Sequence[Message], place: str = "messages") -> list[Message]:
    """The messages with every content as one text. Raises BadRequest for a part that is no text.

    Most templates print a list of parts as Python spells it, or leave it out.
    """
    return [_message(f"{place}.{at}.content", message) for at, message in enumerate(messages)]


def to_be_continued(messages: Sequence[Message]) -> list[Message]:
    """The messages with an end of the last one's text that is found in the prompt. Raises BadRequest without a text."""
    message = messages[-1]
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise BadRequest(
            f"continue_final_message: the last message must have a text to go on with, received {quoted(content)}; "
            "leave it out, or send what the answer begins with as the last message"
        )
    return [*messages[:-1], {**message, "content": f"{content}{_END} "}]


def before_the_end(text: str, messages: Sequence[Message]) -> str:
    """A prompt of such messages, up to that end. Raises BadRequest where the template left the last message out."""
    text, found, behind = text.rpartition(_END)
    if not found:
        raise BadRequest(
            f"continue_final_message: the chat template leaves out the last message, received {quoted(messages[-1])}; "
            "leave it out"
        )
    return text if behind.startswith(" ") else text.rstrip()  # as the template does with the space behind the mark


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
