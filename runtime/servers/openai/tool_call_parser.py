"""Incremental parser of text with tool calls in the format of a model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandemrt.runtime.grammars.notation import NOTATIONS, Style
from tandemrt.runtime.servers.openai.json_calls import JsonNesting
from tandemrt.runtime.servers.openai.notation_reader import NotationReader
from tandemrt.runtime.servers.openai.tool_call_fields import Field, FieldTags, fields
from tandemrt.runtime.servers.openai.tool_call_format import CallId, ToolCallFormat

Step = str | tuple[int, str | None, str]


class TaggedCallParser:
    """Splits text with calls in it. The text must follow the format or be a prefix of such a text.

    ``parameters`` are the JSON schemas of the functions by name.
    """

    def __init__(self, tool_format: ToolCallFormat, parameters: Mapping[str, Any]) -> None:
        self._formats = (tool_format, *tool_format.variants)
        self._format = tool_format  # of the current call
        self._parameters = parameters
        self._names: dict[str, str] = {}  # by the beginning of a call after ``first``, longest first
        self._triggers = [each for form in self._formats for each in form.triggers(parameters)]
        self._held = ""  # text that is not certain yet
        self._index = -1
        self._in_call = False  # after the trigger
        self._written_id = ""
        self._steps = self._read()
        next(self._steps)

    def feed(self, text: str) -> Iterator[Step]:
        """Yield what ``text`` adds: plain text, or a call's index, its name where it begins, and argument text."""
        self._held += text
        while (step := next(self._steps)) is not None:
            yield step

    def call_id(self, name: str) -> str | None:
        """Return the id that the model wrote before the arguments of the current call of ``name``, or None."""
        return f"functions.{name}:{self._written_id}" if self._format.named_ids else self._written_id or None

    def finish(self) -> str:
        """Return held text that is not part of a call, at the end of the answer."""
        return "" if self._in_call else self._held

    def _read(self) -> Iterator[Step | None]:
        """Yield the steps of the whole answer, and None where more text is needed."""
        yield None
        while True:
            yield from self._text()
            more = True
            while more:
                yield from self._call()
                last, between = self._format.last, self._format.between
                while not self._held.startswith(last) and not (between and self._held.startswith(between)):
                    yield None
                more = not self._held.startswith(last)
                self._take(between if more and between else last)
            self._in_call = False

    def _text(self) -> Iterator[Step | None]:
        """Read text up to and including the beginning of a call."""
        while not (starts := [at for each in self._triggers if (at := self._held.find(each)) >= 0]):
            uncertain = max(_partial(self._held, each) for each in self._triggers)
            if text := self._take(self._held[: len(self._held) - uncertain]):
                yield text
            yield None
        if text := self._take(self._held[: min(starts)]):
            yield text
        self._in_call = True
        while not (begun := [form for form in self._formats if self._held.startswith(form.first)]):
            yield None
        self._format = begun[0]
        self._names = {name + begun[0].opening: name for name in sorted(self._parameters, key=len, reverse=True)}
        self._take(self._format.first)

    def _call(self) -> Iterator[Step | None]:
        while (begin := self._begin()) is None:
            yield None
        self._take(begin)
        name = self._names[begin]
        yield from self._skip(self._format.opening_id)
        self._index += 1
        yield self._index, name, ""
        arguments = self._object() if self._format.fields is None else self._fields(name, self._format.fields)
        for each in arguments:
            yield each if each is None else (self._index, None, each)
        if self._format.closing_id is not None:
            while not self._held.startswith(self._format.closing):
                yield None
            self._take(self._format.closing)
            yield from self._skip(self._format.closing_id)

    def _begin(self) -> str | None:
        """Return the name and ``opening`` that the held text begins with; None if it is too short to tell."""
        begin = next((each for each in self._names if self._held.startswith(each)), None)
        longer = (each for each in self._names if len(each) > len(self._held) and each.startswith(self._held))
        return None if any(longer) else begin

    def _skip(self, call_id: CallId | None) -> Iterator[None]:
        if call_id is None:
            return
        while call_id.end not in self._held:
            yield None
        self._written_id = self._take(self._held[: self._held.index(call_id.end)])
        self._take(call_id.end)

    def _object(self) -> Iterator[str | None]:
        """Read arguments that are one object, and yield them as JSON."""
        if self._format.style != "json":
            yield from self._translated(self._format.style)
            return
        nesting = JsonNesting()
        while True:
            for at, character in enumerate(self._held):
                nesting.feed(character)
                if nesting.depth == 0 and not nesting.in_string:
                    yield self._take(self._held[: at + 1])
                    return
            if self._held:
                yield self._take(self._held)
            yield None

    def _translated(self, style: Style) -> Iterator[str | None]:
        reader = NotationReader(NOTATIONS[style])
        while not reader.done:
            text, size = reader.read(self._held)
            self._take(self._held[:size])
            if text:
                yield text
            if not reader.done:
                yield None

    def _fields(self, function: str, tags: FieldTags) -> Iterator[str | None]:
        """Read arguments that are written one by one, and yield them as the text of a JSON object."""
        begins = {tags.begin(field.name, field.kind): field for field in fields(function, self._parameters[function])}
        _, *ends = self._format.after_field
        separator = "{"
        while True:
            begin = next((each for each in begins if self._held.startswith(each)), None)
            if begin is not None:
                field = begins[begin]
                self._take(begin)
                yield f"{separator}{json.dumps(field.name, ensure_ascii=False)}: "
                yield from self._value(field, tags)
                separator = ", "
            elif any(map(self._held.startswith, ends)):
                yield "}" if separator == ", " else "{}"
                return
            else:
                yield None

    def _value(self, field: Field, tags: FieldTags) -> Iterator[str | None]:
        if field.kind == "json":
            end = tags.after
            if self._format.style == "json":
                yield from self._json_value(end)
                return
            yield from self._translated(self._format.style)
            while not self._held.startswith(end):
                yield None
            self._take(end)
            return
        ends = field.ends(tags, self._format.style)
        yield from self._text_value(field, ends)
        self._take(next(filter(self._held.startswith, ends)))

    def _text_value(self, field: Field, ends: Sequence[str]) -> Iterator[str | None]:
        """Read a text up to the first of ``ends`` that the next argument or the end of the call follows."""
        followed = [end + following for end in ends for following in self._format.after_field]
        whole = field.kind == "text or json"
        if not whole:
            yield '"'
        while not (ended := [at for each in followed if (at := self._held.find(each)) >= 0]):
            uncertain = max(_partial(self._held, each) for each in followed)
            if not whole and (text := self._take(self._held[: len(self._held) - uncertain])):
                yield json.dumps(text, ensure_ascii=False)[1:-1]
            yield None
        text = self._take(self._held[: min(ended)])
        yield field.value(text, self._format.style) if whole else json.dumps(text, ensure_ascii=False)[1:]

    def _json_value(self, end: str) -> Iterator[str | None]:
        nesting = JsonNesting()  # a text inside the value may contain ``end``
        while True:
            at = 0
            while at < len(self._held):
                outside = nesting.depth == 0 and not nesting.in_string
                if outside and (self._held.startswith(end, at) or end.startswith(self._held[at:])):
                    break
                nesting.feed(self._held[at])
                at += 1
            if value := self._take(self._held[:at]):
                yield value
            if self._held.startswith(end):
                self._take(end)
                return
            yield None

    def _take(self, text: str) -> str:
        """Remove ``text``, which the held text begins with, and return it."""
        self._held = self._held[len(text) :]
        return text


def _partial(text: str, word: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``word``."""
    sizes = range(min(len(word) - 1, len(text)), 0, -1)
    return next((size for size in sizes if word.startswith(text[-size:])), 0)
