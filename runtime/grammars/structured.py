"""Structured outputs: from what a request asks to the source of a grammar, or to a refusal."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.errors import BadRequest, NotQuick, clipped, quoted
from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars import patterns, structural_tag
from tandemrt.runtime.grammars.engine import Engine, engine_of
from tandemrt.runtime.grammars.output import OutputCheck
from tandemrt.runtime.grammars.pattern_parts import Unreadable
from tandemrt.runtime.grammars.schema.dialect import dialect_of
from tandemrt.runtime.grammars.schema.emit import enforceable, loosened

ANY_OBJECT = {"type": "object", "additionalProperties": True}
DEEPEST = 64  # levels of nesting in a schema
LARGEST_BITS = 1024  # of a number: beyond, no double holds it
QUICK_CHARACTERS = 1 << 14  # of a schema that is read where it is asked for

Elsewhere = Callable[..., tuple[str, str]]


@dataclass(frozen=True)
class Source:
    """What is handed to the compiler. Two requests of one source share one compilation."""

    kind: str
    text: str
    engine: Engine
    any_whitespace: bool = True


def read(structured: StructuredOutputs, elsewhere: Elsewhere | None = None) -> tuple[Source, OutputCheck | None]:
    """Return what to compile for a request, and the check of its finished text. Raises BadRequest.

    A schema that is not quick to read is read ``elsewhere``, which calls ``held_json`` and returns its result.
    """
    engine = engine_of(structured)
    spaced = not structured.disable_any_whitespace
    if structured.json_schema is not None:
        text = json.dumps(schema_of(structured.json_schema))
        asked = structured.validate_output, structured.disable_additional_properties
        held, dialect = _held(text, *asked, elsewhere)
        check = OutputCheck(text, dialect) if structured.validate_output else None
        return Source("json", held, engine, spaced), check
    if structured.json_object:
        return Source("json", json.dumps(ANY_OBJECT), engine, spaced), None
    if structured.structural_tag is not None:
        tags = _tags(structured.structural_tag, elsewhere)
        return Source("structural_tag", tags, engine), None
    if structured.regex is not None:
        return Source("regex", _readable(structured.regex), engine), None
    if structured.choice is None:
        return Source("grammar", _checked_ebnf(structured.grammar or ""), engine), None
    if engine == "llguidance":
        return Source("regex", "|".join(map(patterns.literal, structured.choice)), engine), None
    return Source("grammar", _choice_grammar(structured.choice), engine), None


def _held(text: str, loose: bool, closed: bool, elsewhere: Elsewhere | None) -> tuple[str, str]:
    """As ``held_json``, here where that is quick."""
    try:
        if elsewhere is not None and len(text) > QUICK_CHARACTERS:
            raise NotQuick
        return held_json(text, loose, closed, quick=elsewhere is not None)
    except NotQuick:
        assert elsewhere is not None
        return elsewhere(held_json, text, loose, closed)


def _tags(given: dict[str, Any] | str, elsewhere: Elsewhere | None) -> str:
    """The format of a structural tag, as JSON, in which every schema is one that a grammar is compiled from."""
    found = structural_tag.read(schema_of(given, kind="structural_tag"))

    def held(schema: Any) -> Any:
        return json.loads(_held(json.dumps(schema), False, True, elsewhere)[0])

    return json.dumps(structural_tag.with_schemas(found, held))


def held_json(schema: str, loose: bool, closed: bool, quick: bool = False) -> tuple[str, str]:
    """Return the schema that a grammar is compiled from, as JSON, and the dialect of ``schema``. Raises BadRequest."""
    value = json.loads(schema)
    return json.dumps((loosened if loose else enforceable)(value, closed=closed, quick=quick)), dialect_of(value)


def schema_of(given: dict[str, Any] | bool | str, most_bytes: int = 1 << 18, kind: str = "json") -> Any:
    """A schema (or a structural tag, as ``kind`` has it) as it was given, copied, or parsed where it is text.

    Raises BadRequest for what is no JSON or too large.

    The size is that of its characters and values, each counted wherever it stands.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            what = "the schema" if kind == "json" else "it"
            raise BadRequest(f"structured_outputs.{kind}: {what} is not JSON: {clipped(error)}") from None
    return _Reader(most_bytes, kind).read(given)


class _Reader:
    """Copies a schema value by value, so that nobody changes it meanwhile, and refuses what is not JSON."""

    def __init__(self, most: int, kind: str) -> None:
        self._most = self._left = most
        self._kind = kind
        self._path: list[str] = []
        self._around: list[int] = []  # ids of what the value stands in

    def read(self, value: Any) -> Any:
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise self._refusal(f"must be at most {self._most} bytes (max_grammar_bytes), got more; shorten it")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and value.bit_length() <= LARGEST_BITS:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, dict):
            if strange := [key for key in value if not isinstance(key, str)]:
                raise self._refusal(f"keys must be texts, got {quoted(strange[0])}; write it as one")
            self._left -= sum(map(len, value))
            return {key: self._within(value, key, child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._within(value, str(index), child) for index, child in enumerate(value)]
        if isinstance(value, int | float):
            raise self._refusal(f"numbers must be finite and below 2^{LARGEST_BITS}, got {quoted(value)}; leave it out")
        raise self._refusal(f"must be JSON, got {quoted(value)} of type {type(value).__name__}; leave it out")

    def _within(self, outer: Any, name: str, value: Any) -> Any:
        self._path.append(name)
        self._around.append(id(outer))
        if id(value) in self._around:
            raise self._refusal("must not hold itself, got a cycle; use $ref for what repeats")
        if len(self._path) >= DEEPEST:
            raise self._refusal(f"must be nested at most {DEEPEST} levels deep, got more; flatten it")
        copy = self.read(value)
        self._path.pop()
        self._around.pop()
        return copy

    def _refusal(self, text: str) -> BadRequest:
        place = f" (at {clipped('/'.join(['#', *self._path]))})" if self._path else ""
        return BadRequest(f"structured_outputs.{self._kind}: {text}{place}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _readable(pattern: str) -> str:
    try:
        return patterns.full(pattern)
    except Unreadable as reason:
        raise BadRequest(
            f"structured_outputs.regex: {reason} cannot be enforced; rewrite it without, got {quoted(pattern)}"
        ) from None


def _checked_ebnf(source: str) -> str:
    found = next((piece["refused"] for piece in _EBNF.finditer(source) if piece["refused"]), None)
    if found:
        raise BadRequest(
            f"structured_outputs.grammar: rule options and token macros do not hold under speculation, got "
            f"{quoted(found)}; write the limit as a repetition"
        )
    return source


def _choice_grammar(choices: tuple[str, ...]) -> str:
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, choice))}"' for choice in choices)


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


_LITERAL = r'"(?:\\.|[^"\\])*+"'
_SPACE = r"(?:\s|#[^\n]*+)*+"
_MACROS = "Token|ExcludeToken|AnyTokens|TagDispatch|TokenTagDispatch"
# What is refused, and what may hold the same characters without meaning it (a literal, a class, a comment), in one
# pass: a quote in a class opens no literal. Whatever is left open reaches to the end, so the pass is linear.
_EBNF = re.compile(
    rf'(?P<refused>\b\w++{_SPACE}\[(?:{_LITERAL}|[^\]"])*+\]{_SPACE}::=|\b(?:{_MACROS}){_SPACE}\()'
    rf'|"(?:\\.|[^"\\])*+(?:"|\Z)|\[(?:\\.|[^\]\\])*+(?:\]|\Z)|#[^\n]*+',
    re.DOTALL,
)
