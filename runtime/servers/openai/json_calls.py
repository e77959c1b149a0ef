"""Incremental parser of ``[{"name": "f", "arguments": {...}}, ...]``: tool calls as a JSON list.

The parser passes arguments on as text, without parsing them.
"""

import json
from collections.abc import Iterator
from itertools import groupby

_CALL_DEPTH = 2  # brackets around the keys of a call; its arguments are one level deeper


class JsonNesting:
    """Bracket depth of a JSON text that is read one character at a time."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def feed(self, character: str) -> None:
        """Advance by one character."""
        if not self.in_string:
            self.depth += (character in "[{") - (character in "]}")
        if self._escaped:
            self._escaped = False
        elif self.in_string and character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = not self.in_string


class JsonCallParser:
    """Splits a JSON list of calls into names and argument texts. The text must be a prefix of such a list."""

    def __init__(self) -> None:
        self._nesting = JsonNesting()
        self._index = -1
        self._head = ""  # text of the current call before its arguments
        self._in_arguments = False

    def feed(self, text: str) -> Iterator[tuple[int, str | None, str]]:
        """Yield what ``text`` adds: the call's index, its name where the arguments begin, and argument text."""
        steps = (self._step(character) for character in text)
        known = [step for step in steps if step is not None]
        for (index, name), group in groupby(known, key=lambda step: step[:2]):
            yield index, name, "".join(step[2] for step in group)

    def _step(self, character: str) -> tuple[int, str | None, str] | None:
        opens = character in "[{" and not self._nesting.in_string
        self._nesting.feed(character)
        depth = self._nesting.depth
        if opens and depth == _CALL_DEPTH:
            self._index, self._head = self._index + 1, ""
        begins = opens and depth == _CALL_DEPTH + 1 and not self._in_arguments
        self._in_arguments = self._in_arguments or begins
        if not self._in_arguments:
            self._head += character
            return None
        self._in_arguments = depth > _CALL_DEPTH
        return self._index, self._name() if begins else None, character

    def _name(self) -> str:
        """Return the name in ``{"name": "f", "arguments": ``."""
        return str(json.loads(self._head.rsplit(",", 1)[0] + "}")["name"])
