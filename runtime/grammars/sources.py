"""Convert the structured outputs of a request to a source for the grammar compiler, or reject them."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from tandemrt.engines.parameters.sampling import StructuredOutputs, Whitespace
from tandemrt.engines.validation.errors import BadRequest, NotQuick, clipped, quoted
from tandemrt.runtime.grammars import structural_tag
from tandemrt.runtime.grammars.engine_choice import Engine, choose_engine
from tandemrt.runtime.grammars.output_check import OutputCheck
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.schema.dialect import MAX_NUMBER_BITS, dialect_of
from tandemrt.runtime.grammars.schema.emit import enforceable, relaxed
from tandemrt.runtime.grammars.schema.shapes import remainders
from tandemrt.runtime.grammars.schema.spelling import spelling_warnings
from tandemrt.runtime.grammars.unique.places import without_unique_items

log = logging.getLogger(__name__)

T = TypeVar("T")

ANY_OBJECT = {"type": "object", "additionalProperties": True}
MAX_DEPTH = 64  # levels of nesting in a schema
MAX_ALL_REMAINDERS = 20_000  # of all numbers; the engine's time for them grows with its square, 0.1 s for these
QUICK_CHARACTERS = 1 << 14  # a longer schema or structural tag is converted in a worker process

InWorker = Callable[
    ..., Any
]  # takes a function and its arguments; returns the function's result, or a list for a tuple


@dataclass(frozen=True)
class Source:
    """The input of the compiler. Requests with equal sources share one compilation."""

    kind: str
    text: str
    engine: Engine
    whitespace: Whitespace = "bounded"  # between tokens of JSON
    loose: bool = False  # a looser schema may replace one that the engine rejects; the finished text is validated


def read(
    structured: StructuredOutputs, in_worker: InWorker | None = None, *, most_bytes: int = 1 << 18
) -> tuple[Source, OutputCheck | None]:
    """Return the source of a request's grammar, and the check of its finished text or None. Raises BadRequest.

    ``most_bytes``: the maximum size of a schema or a structural tag.

    ``in_worker`` calls a function in a worker process; it is used for schemas and structural tags that are
    slow to convert. None: each is converted in this thread.
    """
    engine = choose_engine(structured)
    if structured.json_schema is not None:
        text = json.dumps(schema_of(structured.json_schema, most_bytes))
        for line in spelling_warnings(structured):
            log.warning("%s", line)
        options = structured.validate_output, structured.disable_additional_properties
        converted, dialect = _converted(in_worker, enforceable_json, text, *options)
        _require_few_remainders("json", converted)
        check = OutputCheck(text, dialect) if structured.validate_output else None
        return Source("json", converted, engine, structured.whitespace, loose=check is not None), check
    if structured.json_object:
        return Source("json", json.dumps(ANY_OBJECT), engine, structured.whitespace), None
    if structured.structural_tag is not None:
        text = json.dumps(schema_of(structured.structural_tag, most_bytes, "structural_tag"))
        tags = _converted(in_worker, enforceable_tags, text)
        _require_few_remainders("structural_tag", tags)
        return Source("structural_tag", tags, engine, structured.whitespace), None
    if structured.regex is not None:
        return Source("regex", _full_pattern(structured.regex), engine), None
    if structured.choice is None:
        return Source("grammar", _checked_ebnf(structured.grammar or ""), engine), None
    if engine == "llguidance":
        return Source("regex", "|".join(map(patterns.literal, structured.choice)), engine), None
    return Source("grammar", _choice_grammar(structured.choice), engine), None


def _converted(in_worker: InWorker | None, convert: Callable[..., T], text: str, *options: bool) -> T:
    """Return ``convert(text, *options)``, computed in this thread if it is fast and otherwise in a worker process."""
    try:
        if in_worker is not None and len(text) > QUICK_CHARACTERS:
            raise NotQuick
        return convert(text, *options, quick=in_worker is not None)
    except NotQuick:
        assert in_worker is not None
        return in_worker(convert, text, *options)  # type: ignore[no-any-return]


def enforceable_tags(tags: str, quick: bool = False) -> str:
    """Return the format of a structural tag as JSON, with every schema converted. Raises as ``enforceable_json``."""
    tag_format = structural_tag.read(json.loads(tags))

    def converted(schema: Any) -> Any:
        return json.loads(enforceable_json(json.dumps(schema), False, True, quick)[0])

    written = structural_tag.with_schemas(tag_format, converted)
    notation = next((style for style in structural_tag.styles(tag_format) if style != "json"), None)
    if notation and structural_tag.with_schemas(written, without_unique_items) != written:
        raise BadRequest(
            "structured_outputs.structural_tag: uniqueItems of unlisted values is only supported in JSON, received a "
            f"part in the notation {notation}; list the items in an enum, or leave it out"
        )
    return json.dumps(written)


def _require_few_remainders(kind: str, text: str) -> None:
    if '"multipleOf"' not in text:
        return
    steps = {Fraction(str(value)) for value in _multiples(json.loads(text))}
    total = sum(map(remainders, steps))
    if total > MAX_ALL_REMAINDERS:
        raise BadRequest(
            f"structured_outputs.{kind}: the values of multipleOf must be at most {MAX_ALL_REMAINDERS} together, "
            f"without the zeros at their ends, got {total} of {len(steps)} values; use smaller ones"
        )


def _multiples(value: Any) -> Iterator[int | float]:
    """Yield the values of multipleOf in the schemas within ``value``."""
    if isinstance(value, dict):
        if isinstance(value.get("multipleOf"), int | float):
            yield value["multipleOf"]
        value = [child for key, child in value.items() if key not in ("const", "enum")]
    if isinstance(value, list):
        for child in value:
            yield from _multiples(child)


def load_modules() -> None:
    """Import what conversions and checks need; otherwise the first one in a worker process is slow."""
    OutputCheck("{}", dialect_of({}))("{}")


def enforceable_json(schema: str, loose: bool, closed: bool, quick: bool = False) -> tuple[str, str]:
    """Return the schema that the grammar enforces, as JSON, and the dialect of ``schema``.

    Raises BadRequest, and NotQuick if ``quick`` is set and the conversion takes long.
    """
    value = json.loads(schema)
    return json.dumps((relaxed if loose else enforceable)(value, closed=closed, quick=quick)), dialect_of(value)


def schema_of(source: dict[str, Any] | bool | str, most_bytes: int, kind: str = "json") -> Any:
    """Return a copy of a schema, or of a structural tag if ``kind`` says so; a text is parsed as JSON.

    Raises BadRequest for a value that is not JSON or too large. The size counts all characters and values, and a
    repeated value each time.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            what = "the schema" if kind == "json" else "the value"
            raise BadRequest(f"structured_outputs.{kind}: {what} is not JSON: {clipped(error)}") from None
    return _SchemaCopier(most_bytes, kind).read(source)


class _SchemaCopier:
    """Copies a schema, so that later changes by the caller have no effect, and rejects values that are not JSON."""

    def __init__(self, most: int, kind: str) -> None:
        self._most = self._left = most
        self._kind = kind
        self._path: list[str] = []
        self._around: list[int] = []  # id() of each container around the current value

    def read(self, value: Any) -> Any:
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise self._error(f"must be at most {self._most} bytes (max_grammar_bytes), got more; shorten it")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and value.bit_length() <= MAX_NUMBER_BITS:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, dict):
            if strange := [key for key in value if not isinstance(key, str)]:
                raise self._error(f"keys must be texts, got {quoted(strange[0])}; write it as one")
            self._left -= sum(map(len, value))
            return {key: self._within(value, key, child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._within(value, str(index), child) for index, child in enumerate(value)]
        if isinstance(value, int | float):
            raise self._error(
                f"numbers must be finite and below 2^{MAX_NUMBER_BITS}, got {quoted(value)}; leave it out"
            )
        raise self._error(f"must be JSON, got {quoted(value)} of type {type(value).__name__}; leave it out")

    def _within(self, outer: Any, name: str, value: Any) -> Any:
        self._path.append(name)
        self._around.append(id(outer))
        if id(value) in self._around:
            raise self._error("must not contain itself, got a cycle; use $ref for recursion")
        if len(self._path) >= MAX_DEPTH:
            raise self._error(f"must be nested at most {MAX_DEPTH} levels deep, got more; flatten it")
        copy = self.read(value)
        self._path.pop()
        self._around.pop()
        return copy

    def _error(self, text: str) -> BadRequest:
        place = f" (at {clipped('/'.join(['#', *self._path]))})" if self._path else ""
        return BadRequest(f"structured_outputs.{self._kind}: {text}{place}")


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _full_pattern(pattern: str) -> str:
    try:
        return patterns.fullmatch_expression(pattern)
    except UnsupportedPattern as reason:
        raise BadRequest(
            f"structured_outputs.regex: {reason} cannot be enforced; rewrite it without this, got {quoted(pattern)}"
        ) from None


def _checked_ebnf(source: str) -> str:
    rejected = next((match["rejected"] for match in _EBNF.finditer(source) if match["rejected"]), None)
    if rejected:
        raise BadRequest(
            f"structured_outputs.grammar: rule options and token macros are not supported, got "
            f"{quoted(rejected)}; write the limit as a repetition"
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
# Finds the rejected constructs in one pass. Literals, classes and comments are skipped, because they may contain the
# same characters. An unclosed literal or class extends to the end of the text, so that the pass takes linear time.
_EBNF = re.compile(
    rf'(?P<rejected>\b\w++{_SPACE}\[(?:{_LITERAL}|[^\]"])*+\]{_SPACE}::=|\b(?:{_MACROS}){_SPACE}\()'
    rf'|"(?:\\.|[^"\\])*+(?:"|\Z)|\[(?:\\.|[^\]\\])*+(?:\]|\Z)|#[^\n]*+',
    re.DOTALL,
)
