"""Reads a list of calls, ``[{"name": "f", "arguments": {...}}, ...]``, as its text comes, without parsing arguments."""

import json
from collections.abc import Iterator
from itertools import groupby

_CALL = 2  # levels deep stand the keys of a call; its arguments begin one level further


class Brackets:
    """How deep the characters of a JSON text stand, one after another."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def step(self, character: str) -> None:
        """Go on by one character."""
        if not self.in_string:
            self.depth += (character in "[{") - (character in "]}")
        if self._escaped:
            self._escaped = False
        elif self.in_string and character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = not self.in_string


class CallReader:
    """What it reads is valid JSON of that shape, or the beginning of it."""

    def __init__(self) -> None:
        self._brackets = Brackets()
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
        opens = character in "[{" and not self._brackets.in_string
        self._brackets.step(character)
        depth = self._brackets.depth
        if opens and depth == _CALL:
            self._index, self._head = self._index + 1, ""
        begins = opens and depth == _CALL + 1 and not self._open
        self._open = self._open or begins
        if not self._open:
            self._head += character
            return None
        self._open = depth > _CALL
        return self._index, self._name() if begins else None, character

    def _name(self) -> str:
        """The name in ``{"name": "f", "arguments": ``, the head of a call."""
        return str(json.loads(self._head.rsplit(",", 1)[0] + "}")["name"])
