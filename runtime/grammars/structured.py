"""Structured outputs: from what a request asks to the source of a grammar, or to a refusal."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.engine import Engine, engine_of
from tandemrt.runtime.grammars.output import OutputCheck
from tandemrt.runtime.grammars.schema.dialect import dialect_of
from tandemrt.runtime.grammars.schema.emit import enforceable, loosened

ANY_OBJECT = {"type": "object", "additionalProperties": True}
DEEPEST = 64  # levels of nesting in a schema
MOST_VALUES = 1 << 18  # in a schema: more than fit the largest source
LARGEST_BITS = 1024  # of a number: beyond, no double holds it


@dataclass(frozen=True)
class Source:
    """What is handed to the compiler. Two requests of one source share one compilation."""

    kind: str
    text: str
    engine: Engine
    any_whitespace: bool = True


def read(structured: StructuredOutputs) -> tuple[Source, OutputCheck | None]:
    """Return what to compile for a request, and the check of its finished text. Raises BadRequest."""
    engine = engine_of(structured)
    spaced = not structured.disable_any_whitespace
    if structured.json_schema is not None:
        schema = schema_of(structured.json_schema)
        held = loosened(schema) if structured.validate_output else enforceable(schema)
        check = OutputCheck(json.dumps(schema), dialect_of(schema)) if structured.validate_output else None
        return Source("json", json.dumps(held), engine, spaced), check
    if structured.json_object:
        return Source("json", json.dumps(ANY_OBJECT), engine, spaced), None
    if structured.regex is not None:
        return Source("regex", _readable(structured.regex), engine), None
    if structured.choice is None:
        return Source("grammar", _checked_ebnf(structured.grammar or ""), engine), None
    if engine == "llguidance":
        return Source("regex", "|".join(map(patterns.literal, structured.choice)), engine), None
    return Source("grammar", _choice_grammar(structured.choice), engine), None


def schema_of(given: dict[str, Any] | bool | str) -> Any:
    """A schema as it was given, copied, or parsed where it is text. Raises BadRequest for what is no JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"structured_outputs.json: the schema is not JSON: {clipped(error)}") from None
    return _Reader().read(given)


class _Reader:
    """Copies a schema value by value, so that nobody changes it meanwhile, and refuses what is not JSON."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self._around: list[int] = []  # ids of what the value stands in
        self._count = 0

    def read(self, value: Any) -> Any:
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._refusal(f"must hold at most {MOST_VALUES} values, got more; simplify it")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and value.bit_length() <= LARGEST_BITS:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, dict):
            if strange := [key for key in value if not isinstance(key, str)]:
                raise self._refusal(f"keys must be texts, got {quoted(strange[0])}; write it as one")
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
        return BadRequest(f"structured_outputs.json: {text}{place}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _readable(pattern: str) -> str:
    try:
        return patterns.full(pattern)
    except patterns.Unreadable as reason:
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
