"""Read a JSON text byte by byte, and find items of arrays that equal earlier items."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tandemrt.runtime.grammars.unique.equality import may_become, number, same_number
from tandemrt.runtime.grammars.unique.places import Freedom, Place, Places
from tandemrt.runtime.grammars.unique.token_index import TokenIndex

# An earlier value that a value may still equal, and the number of the array and item that it is from.
Rival = tuple[int, Any]

VALUE, STRING, NUMBER, WORD, AFTER, NAME_START, NAME, COLON, OUTSIDE = range(9)  # OUTSIDE: not in a JSON text

NUMBER_BYTES = b"+-.0123456789Ee"
_SPACE, _WORDS = b" \t\n\r", {"true": True, "false": False, "null": None}
_QUOTE, _BACKSLASH, _HIGH_SURROGATES = 0x22, 0x5C, range(0xD800, 0xDC00)
_EXPECTED = {NUMBER: NUMBER_BYTES + b",]}", WORD: b"truefalsn", AFTER: b",]}", NAME_START: b'"}', COLON: b":"}
_PER_LEVEL = 1 << 32  # more than the items of an array


class Level(NamedTuple):
    """An open array or object.

    Attributes:
        depth: 0 for the outermost level.
        places: the alternatives of the schema for it.
        unique: whether items, or names, must differ from each other.
        freedom: how freely the items of this array, and of those around it, can be continued.
        kept: whether this value is an item of a unique array, or part of one, or such an array.
        values: the complete items, or pairs of a name and a value; empty unless ``kept``.
        size: the number of complete items or pairs.
        name: the name of the current value of an object.
        rivals: the earlier values that this value may still equal.
    """

    above: "Level | None"
    depth: int
    is_array: bool
    places: tuple[Place, ...]
    unique: bool
    freedom: Freedom
    kept: bool
    values: tuple[Any, ...] = ()
    size: int = 0
    name: str = ""
    rivals: tuple[Rival, ...] = ()


class State(NamedTuple):
    """The state after some bytes of a text."""

    mode: int
    level: Level | None = None
    text: str = ""  # a decoded beginning of a string, or the beginning of a number or word
    pending: bytes = b""  # bytes of a string that do not make a character yet
    places: tuple[Place, ...] = ()  # alternatives for the value that comes next
    rivals: tuple[Rival, ...] = ()  # of the value that is being read
    part: Any = None  # of a structural tag (tags.py)

    @property
    def in_string(self) -> bool:
        return self.mode in (STRING, NAME)

    @property
    def may_repeat(self) -> bool:
        """Whether the text may be continued such that an unfinished value equals an earlier one."""
        if self.mode == NUMBER:
            return any(may_become(self.text, value) for _, value in self.rivals)
        if self.mode in (AFTER, COLON, NAME_START):
            return bool(self.level and (self.level.rivals or (self.mode == NAME_START and self._names)))
        return bool(self.rivals) or (self.mode == VALUE and self._may_be_empty)

    @property
    def _may_be_empty(self) -> bool:
        level = self.level
        return level is not None and level.is_array and not level.size and bool(level.rivals)

    @property
    def _names(self) -> bool:
        return bool(self.level and self.level.unique and self.level.values)


class TextReader(ABC):
    """Steps from state to state of a text that a grammar has checked.

    Attributes:
        start: the state before the first byte.
    """

    start: State

    @abstractmethod
    def step(self, state: State, byte: int) -> State | None:
        """Return ``read(state, bytes([byte]))``."""

    def read(self, state: State, text: bytes) -> State | None:
        """Return the state after ``text``; None if an item, or a name in an item, equals an earlier one."""
        for byte in text:
            following = self.step(state, byte)
            if following is None:
                return None
            state = following
        return state

    def control(self, state: State, _token: int) -> State:
        """Return the state after a control token, which has no text."""
        return state

    def opening(self, state: State, index: TokenIndex) -> np.ndarray:
        """Return the tokens that may open a unique array and repeat an item of it."""
        return index.opening.in_string if state.in_string else index.opening.elsewhere


class Reader(TextReader):
    """Reads a JSON text of a schema."""

    def __init__(self, places: Places) -> None:
        self._names_repeat = places.names_repeat
        self.start = State(VALUE, places=places.root)

    def step(self, state: State, byte: int) -> State | None:
        mode = state.mode
        if mode in (STRING, NAME):
            return self._character(state, byte)
        if mode == NUMBER:
            if byte in NUMBER_BYTES:
                return state._replace(text=state.text + chr(byte))
            value = number(state.text)
            ended = _ended(state.level, value, [each for each in state.rivals if same_number(value, each[1])])
            return ended and self.step(ended, byte)
        if byte in _SPACE:
            return state
        if mode == WORD:
            text = state.text + chr(byte)
            rivals = _words(text, state.rivals)
            if text in _WORDS:
                return _ended(state.level, _WORDS[text], rivals)
            return state._replace(text=text, rivals=rivals)
        return self._structure(state, chr(byte))

    def _structure(self, state: State, letter: str) -> State | None:
        level = state.level
        if letter in "]}":
            return self._closed(level)
        if letter == ",":
            if level is None or level.is_array:
                return self._item(level)
            return State(NAME_START, level)
        if letter == ":":
            assert level is not None
            places = tuple(place for each in level.places for place in each.property(level.name))
            return State(VALUE, level, places=places, rivals=_members(level.rivals, level.name))
        if letter == '"':
            if state.mode == NAME_START:
                return State(NAME, level, rivals=_names(level))
            return State(STRING, level, rivals=tuple(each for each in state.rivals if isinstance(each[1], str)))
        if letter in "[{":
            return self._opened(state, letter == "[")
        if letter in "tfn":
            return State(WORD, level, letter, rivals=_words(letter, state.rivals))
        return State(NUMBER, level, letter, rivals=state.rivals)

    def _opened(self, state: State, is_array: bool) -> State:
        above, places = state.level, tuple(place for place in state.places if place.is_array == is_array)
        within = above is not None and above.kept
        unique = any(place.unique for place in places) if is_array else within and self._names_repeat
        freedom = max([place.freedom for place in places if place.unique], default=Freedom.ALWAYS)
        if above is not None:
            freedom = max(freedom, above.freedom)
        if unique and not is_array:
            freedom = Freedom.UNKNOWN
        level = Level(
            above,
            0 if above is None else above.depth + 1,
            is_array,
            places,
            unique,
            freedom,
            within or unique,
            rivals=tuple(each for each in state.rivals if isinstance(each[1], list if is_array else dict)),
        )
        return self._item(level) if is_array else State(NAME_START, level)

    def _item(self, level: Level | None) -> State:
        """Return the state before an item of an array."""
        if level is None:
            return State(VALUE)
        index = level.size
        rivals = [(key, value[index]) for key, value in level.rivals if index < len(value)]
        if level.unique:
            rivals += enumerate(level.values, level.depth * _PER_LEVEL)
        places = tuple(place for each in level.places for place in each.item(index))
        return State(VALUE, level, places=places, rivals=tuple(rivals))

    def _closed(self, level: Level | None) -> State | None:
        if level is None:
            return State(AFTER)
        rivals = [each for each in level.rivals if len(each[1]) == level.size]
        value: Any = None
        if level.kept:
            value = list(level.values) if level.is_array else dict(level.values)
        return _ended(level.above, value, rivals)

    def _character(self, state: State, byte: int) -> State | None:
        if byte == _QUOTE and not state.pending:
            if state.mode == NAME:
                return self._named(state)
            return _ended(state.level, state.text, [each for each in state.rivals if each[1] == state.text])
        pending = state.pending + bytes([byte])
        character = _decoded(pending)
        if character is None:
            return state._replace(pending=pending)
        if state.mode == STRING and not state.rivals and not (state.level and state.level.kept):
            return state._replace(pending=b"")  # the text is not needed
        text = state.text + character
        rivals = tuple(each for each in state.rivals if each[1].startswith(text))
        return State(state.mode, state.level, text, b"", (), rivals)

    def _named(self, state: State) -> State | None:
        level, name = state.level, state.text
        assert level is not None
        if level.unique and any(name == other for other, _ in level.values):
            return None
        return State(COLON, level._replace(name=name, rivals=tuple(each for each in level.rivals if name in each[1])))


def expected(state: State) -> bytes:
    """Return the bytes that may continue a text from ``may_repeat`` to ``may_repeat`` or to an equal value."""
    if state.in_string:
        return _in_string(state)
    if state.mode != VALUE:
        return _SPACE + _EXPECTED[state.mode]
    allowed = _SPACE + b"]"
    for _, value in state.rivals:
        if isinstance(value, bool) or value is None:
            allowed += b"tfn"
        elif isinstance(value, int | float):
            allowed += b"-0123456789"
        else:
            allowed += b'"' if isinstance(value, str) else b"[" if isinstance(value, list) else b"{"
    return allowed


def _in_string(state: State) -> bytes:
    length = len(state.pending)
    if state.pending[:1] == b"\\":
        return b'"\\/bfnrtu' if length == 1 else {6: b"\\", 7: b"u"}.get(length, b"0123456789abcdefABCDEF")
    allowed = set() if state.pending else {_QUOTE, _BACKSLASH}
    at = len(state.text)
    for _, text in state.rivals:
        allowed.update(text[at : at + 1].encode("utf-8", "surrogatepass")[length:][:1])
    return bytes(allowed)


def _ended(level: Level | None, value: Any, rivals: Iterable[Rival]) -> State | None:
    """Return the state after a value of ``level`` that equals ``rivals``; None if one of these is an item of it."""
    if level is None:
        return State(AFTER)
    equal = {key for key, _ in rivals}
    if level.is_array and level.unique and any(key // _PER_LEVEL == level.depth for key in equal):
        return None
    if level.rivals:
        level = level._replace(rivals=tuple(each for each in level.rivals if each[0] in equal))
    more = (value if level.is_array else (level.name, value),) if level.kept else ()
    return State(AFTER, level._replace(values=level.values + more, size=level.size + 1))


def _members(rivals: tuple[Rival, ...], name: str) -> tuple[Rival, ...]:
    return tuple((key, value[name]) for key, value in rivals)


def _names(level: Level | None) -> tuple[Rival, ...]:
    """Return the names that the next name of an object may still equal: those of its rivals, and its own."""
    assert level is not None
    names = [(key, name) for key, value in level.rivals for name in value]
    return tuple(names + [(-1, name) for name, _ in level.values] if level.unique else names)


def _words(text: str, rivals: tuple[Rival, ...]) -> tuple[Rival, ...]:
    words = [word for word in _WORDS if word.startswith(text)]
    return tuple(each for each in rivals if any(each[1] is _WORDS[word] for word in words))


def _decoded(pending: bytes) -> str | None:
    """Return the character that ``pending`` bytes of a string make; None if more bytes are needed."""
    if pending[0] < 0x80:
        if pending[0] != _BACKSLASH:
            return chr(pending[0])
        if len(pending) < 2 or (pending[1:2] == b"u" and len(pending) < 6):
            return None
        if pending[1:2] == b"u" and int(pending[2:6], 16) in _HIGH_SURROGATES and len(pending) < 12:
            return None
        return str(json.loads(b'"' + pending + b'"'))
    length = 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4
    return None if len(pending) < length else pending.decode()
