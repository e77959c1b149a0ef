"""Reads a list of calls, ``[{"name": "f", "arguments": {...}}, ...]``, as its text comes, without parsing arguments."""

import json
from collections.abc import Iterator
from itertools import groupby

_CALL = 2  # levels deep stand the keys of a call; its arguments begin one level further


class CallReader:
    """Follows brackets and strings; what it reads is valid JSON of that shape, or the beginning of it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._index = -1
        self._head = ""  # of a call, before its arguments
        self._open = False  # whether the arguments have begun and not ended

    def read(self, text: str) -> Iterator[tuple[int, str | None, str]]:
        """Yield what ``text`` adds: the call's index, its name if the arguments begin here, and their text."""
        steps = (self._step(character) for character in text)
        known = [step for step in steps if step is not None]
        for (index, name), group in groupby(known, key=lambda step: step[:2]):
            yield index, name, "".join(step[2] for step in group)

    def _step(self, character: str) -> tuple[int, str | None, str] | None:
        begins = False
        if not self._in_string:
            if character in "[{":
                self._depth += 1
                if self._depth == _CALL:
                    self._index, self._head = self._index + 1, ""
                begins = self._depth == _CALL + 1 and not self._open
                self._open = self._open or begins
            elif character in "]}":
                self._depth -= 1
        self._follow_string(character)
        if not self._open:
            self._head += character
            return None
        self._open = self._depth > _CALL
        return self._index, self._name() if begins else None, character

    def _follow_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string and character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string

    def _name(self) -> str:
        """The name in ``{"name": "f", "arguments": ``, the head of a call."""
        return str(json.loads(self._head.rsplit(",", 1)[0] + "}")["name"])
