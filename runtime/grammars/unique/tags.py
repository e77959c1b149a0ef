"""Follow the text of a structural tag, and read its JSON parts for items that equal earlier items."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from tandemrt.runtime.grammars.structural_tag import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    OptionalTag,
    Or,
    Regex,
    SequenceOf,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
    tags_of,
)
from tandemrt.runtime.grammars.tag_grammar import split_at_token, split_controls
from tandemrt.runtime.grammars.unique.places import Places
from tandemrt.runtime.grammars.unique.reader import AFTER, NUMBER, NUMBER_BYTES, OUTSIDE, Reader, State, TextReader
from tandemrt.runtime.grammars.unique.token_index import TokenIndex


@dataclass(eq=False)
class _Literal:
    """A fixed text."""

    text: bytes
    following: "Sequence[_Node]"


@dataclass(eq=False)
class _Control:
    """A control token."""

    token: int
    following: "Sequence[_Node]"


@dataclass(eq=False)
class _Free:
    """A text up to the first of some words, or up to a control token that one of some texts comes before.

    With ``stops``, the text may also go on, until it contains one of them. ``names`` are the texts of control tokens.
    """

    words: "list[tuple[bytes, Sequence[_Node]]]"
    controls: "list[tuple[bytes, int, Sequence[_Node]]]"
    stops: tuple[bytes, ...] = ()
    names: Mapping[int, bytes] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        texts = [*(word for word, _ in self.words), *(before for before, _, _ in self.controls), *self.stops]
        return max(map(len, texts), default=0)


@dataclass(eq=False)
class _Json:
    """A JSON value."""

    reader: Reader
    following: "Sequence[_Node]"


@dataclass(eq=False)
class _Join:
    """Nothing; a list that is not complete yet follows."""

    following: "list[_Node]"


_Node = _Literal | _Control | _Free | _Json | _Join
_Nodes = Sequence[_Node]
_Thread = tuple[_Node, Any]  # with the number of bytes read of a literal, or the last bytes of a free text


class TagReader(TextReader):
    """Steps through a text of a structural tag.

    The grammar of the format checks the text outside of JSON parts. This reader follows it, with all positions in the
    format that it may be at.

    Args:
        part: the format, with schemas from schema/emit.py.
        control: ids of control tokens by name.
        index: the tokens of the vocabulary.

    Raises ValueError if the text before a JSON part does not decide that it begins.
    """

    def __init__(self, part: Format, control: Mapping[str, int], index: TokenIndex) -> None:
        self._control = control
        self._begins: set[bytes] = set()  # the texts right before JSON parts
        self.start = _state(_entered(self._nodes(part, (), ())))
        ids = [token for token in index.opening.elsewhere.tolist() if self._may_begin_json(index.tokens[token])]
        self._entering = np.array(ids, np.int32)

    def step(self, state: State, byte: int) -> State | None:
        part = state.part
        if not isinstance(part, _Json):
            return _state(_stepped(part, byte))
        if state.mode == NUMBER and state.level is None and byte not in NUMBER_BYTES:
            return _state(_stepped(_entered(part.following), byte))
        after = part.reader.step(state, byte)
        if after is not None and after.mode == AFTER and after.level is None:
            return _state(_entered(part.following))
        return after if after is None or after.part is part else after._replace(part=part)

    def control(self, state: State, _token: int) -> State:
        part = state.part
        threads = _entered(part.following) if isinstance(part, _Json) else part  # a number may end here
        return _state([each for thread in threads for each in _after_control(thread, _token)])

    def opening(self, state: State, index: TokenIndex) -> np.ndarray:
        return self._entering if state.mode == OUTSIDE else super().opening(state, index)

    def _may_begin_json(self, text: bytes) -> bool:
        ends = range(1, len(text))
        return any(text[:end] in self._suffixes for end in ends) or any(begin in text for begin in self._begins)

    @cached_property
    def _suffixes(self) -> set[bytes]:
        return {begin[-length:] for begin in self._begins for length in range(1, len(begin) + 1)}

    def _nodes(self, part: Format, ends: Sequence[str], following: _Nodes) -> _Nodes:
        """Return the beginnings of ``part``, which one of ``ends`` and then ``following`` come after."""
        match part:
            case AnyText() | Regex():
                return (self._free(ends, following),)
            case SequenceOf(elements=elements):
                following = self._nodes(elements[-1], ends, following)
                for element in reversed(elements[:-1]):
                    following = self._nodes(element, (), following)
                return following
            case Or(elements=elements):
                return _apart([node for each in elements for node in self._nodes(each, ends, following)])
            case ConstString(value=value):
                return self._texts([value], self._texts(ends, following))
            case JsonSchema(json_schema=schema):
                return (_Json(Reader(Places(schema)), self._texts(ends, following)),)
            case Tag(begin=begin):
                return self._texts([begin], self._rest(part, self._texts(ends, following)))
            case OptionalTag(content=content):
                following = self._texts(ends, following)
                return _apart([*self._nodes(content, (), following), *following])
            case TriggeredTags():
                return (self._triggered(part),)
            case TagsWithSeparator(tags=tags, separator=separator):
                again: list[_Node] = []
                after = _Join(again)
                entry: _Nodes = _apart([node for tag in tags for node in self._nodes(tag, (), (after,))])
                if not part.stop_after_first:
                    again += self._texts([separator], entry)
                again += following
                _apart(again)
                return entry if part.at_least_one else _apart([*entry, *following])

    def _rest(self, tag: Tag, following: _Nodes) -> _Nodes:
        """Return what comes after the begin of ``tag``."""
        if not tag.followed_by:
            return self._nodes(tag.content, tag.ends, following)
        free = self._free(tag.ends, following)
        _apart([free, *following])  # raises if JSON may begin where the text may go on
        free.stops = tuple((end + text).encode() for end in tag.ends for text in tag.followed_by)
        free.names = {token: name.encode() for name, token in self._control.items()}
        return (free,)

    def _triggered(self, part: TriggeredTags) -> _Free:
        free = _Free([], [])
        again: _Nodes = () if part.stop_after_first else (free,)
        for trigger, tags in tags_of(part):
            bodies: list[_Node] = []
            for tag in tags:
                bodies += self._texts([tag.begin[len(trigger) :]], self._rest(tag, again))
            body = _apart(bodies)
            free.words.append((self._before(trigger, body), body))
            control, *rest = split_controls(trigger, self._control)
            if isinstance(control, int):
                free.controls.append((b"", control, self._chain(rest, body)))
        return free

    def _free(self, ends: Sequence[str], following: _Nodes) -> _Free:
        free = _Free([(self._before(end, following), following) for end in ends], [])
        for end in ends:
            before, tokens = split_at_token(end, self._control)
            if tokens:
                first, *rest = tokens
                assert isinstance(first, int)
                free.controls.append((before.encode(), first, self._chain(rest, following)))
        return free

    def _texts(self, texts: Sequence[str], following: _Nodes) -> _Nodes:
        """Return the beginnings of one of ``texts`` with ``following`` after it; of ``following`` without ``texts``."""
        nodes: list[_Node] = []
        for text in texts:
            parts = split_controls(text, self._control)
            nodes += self._chain([text], following)
            if any(isinstance(part, int) for part in parts):
                nodes += self._chain(parts, following)
        return _apart(nodes) if texts else following

    def _chain(self, parts: Sequence[str | int], following: _Nodes) -> _Nodes:
        for part in reversed(parts):
            if isinstance(part, int):
                following = (_Control(part, following),)
            elif part:
                following = (_Literal(self._before(part, following), following),)
        return following

    def _before(self, text: str, following: _Nodes) -> bytes:
        """Return the bytes of a text that ``following`` comes after."""
        if any(isinstance(node, _Json) for node, _ in _entered(following)):
            self._begins.add(text.encode())
        return text.encode()


def _apart(nodes: list[_Node]) -> list[_Node]:
    """Return ``nodes``. Raises ValueError if one is a JSON part, or leads to one, where another may still be read."""
    texts = sorted(
        (node.text, any(isinstance(after, _Json) for after in node.following))
        for node in nodes
        if isinstance(node, _Literal)
    )
    alike = any(json and longer.startswith(text) for (text, json), (longer, _) in pairwise(texts))
    if alike or (len(nodes) > 1 and any(isinstance(node, _Json) for node in nodes)):
        raise ValueError("uniqueItems: the text before a JSON part must decide that it begins; begin it with a text")
    return nodes


def _entered(nodes: _Nodes) -> list[_Thread]:
    threads: list[_Thread] = []
    for node in nodes:
        threads += (
            _entered(node.following) if isinstance(node, _Join) else [(node, b"" if isinstance(node, _Free) else 0)]
        )
    return threads


def _state(threads: Iterable[_Thread]) -> State:
    """Return the state of some positions: of a JSON part if it is one."""
    distinct = tuple(threads)
    json = next((node for node, _ in distinct if isinstance(node, _Json)), None)
    return State(OUTSIDE, part=distinct) if json is None else json.reader.start._replace(part=json)


def _stepped(threads: Iterable[_Thread], byte: int) -> Iterator[_Thread]:
    for node, progress in threads:
        if isinstance(node, _Literal) and node.text[progress] == byte:
            yield from [(node, progress + 1)] if progress + 1 < len(node.text) else _entered(node.following)
        elif isinstance(node, _Free):
            last = (progress + bytes([byte]))[-node.longest :] if node.longest else b""
            ended = [following for word, following in node.words if last.endswith(word)]
            yield from _entered(ended[0]) if ended else ()
            if not (last.endswith(node.stops) if node.stops else ended):
                yield node, last


def _after_control(thread: _Thread, token: int) -> Iterator[_Thread]:
    node, progress = thread
    if isinstance(node, _Control) and node.token == token:
        yield from _entered(node.following)
    elif isinstance(node, _Free):
        for before, control, following in node.controls:
            if token == control and progress.endswith(before):
                yield from _entered(following)
                if node.stops:
                    yield node, before + node.names[control]
