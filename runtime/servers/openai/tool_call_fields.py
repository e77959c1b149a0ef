"""Arguments of a tool call that are written one by one, as ``<parameter=NAME>VALUE</parameter>``.

A string is written without quotes, any other value as JSON or in another notation. Where both are possible, a text that
is JSON of an allowed type is that value. The grammar enforces what it can of a text without quotes; the rest of its
schema is left to the model.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tandemrt.engines.text.formats import PATTERNS
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.grammars.notation import NOTATIONS, Style
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.schema.dialect import dialect_of, keywords, misspelled

Kind = Literal["text", "text or json", "json"]

_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_DEFINITIONS = ("$defs", "definitions")
_CHOICES = ("anyOf", "oneOf")
_READ = {"type", "properties", "required", "additionalProperties"}
_ANY_TEXT = {"type": "any_text"}
_MOST_CHOICES = 16  # inside each other
_MOST_STEPS = 20_000  # for one function: references, choices, and the values in both
_LONGEST_TEXT = 1000  # characters of a counted text; the grammar has a state for each


@dataclass(frozen=True)
class FieldTags:
    """One argument is ``before``, its name, ``text_value`` or ``json_value``, the value, then ``after``."""

    before: str
    text_value: str
    json_value: str
    after: str

    def begin(self, name: str, kind: Kind) -> str:
        """Return what comes before the value of the argument ``name``."""
        return self.before + name + (self.json_value if kind == "json" else self.text_value)


def field_parts(
    tags: FieldTags, followed_by: Sequence[str], function: str, parameters: Mapping[str, Any], style: Style
) -> list[dict[str, Any]]:
    """Return the parts of a structural tag for the arguments of ``function``, in the order of its properties.

    One of ``followed_by`` comes after each argument. ``style`` is the notation of values that are not texts.

    Raises BadRequest for parameters that cannot be enforced in this form.
    """
    if other := next((key for key in _keywords(function, dict(parameters)) if key not in _READ), None):
        raise _unsupported(function, f"the keyword {quoted(other)} together with properties")
    if wrong := next((key for key in parameters if misspelled(key)), None):
        raise _unsupported(function, f"the keyword {quoted(wrong)} (did you mean {misspelled(wrong)!r}?)")
    required, parts = frozenset(parameters.get("required", ())), []
    for field in fields(function, parameters):
        value = {"type": "json_schema", "json_schema": field.schema, "style": style}
        content = value if field.kind == "json" else _text(field.schema, style)
        begin, end = tags.begin(field.name, field.kind), field.ends(tags, style)[-1]
        tag = {"type": "tag", "begin": begin, "content": content, "end": end}
        if content == _ANY_TEXT:
            tag["followed_by"] = followed_by
        if field.name in required:
            parts.append(tag)
        elif field.types:  # an empty enum has no value
            parts.append({"type": "optional", "content": tag})
    return parts


def _keywords(function: str, parameters: dict[str, Any]) -> Collection[str]:
    try:
        return keywords(parameters, dialect_of(parameters))
    except BadRequest as error:
        reason = str(error).removeprefix("structured_outputs.json: ")
        raise BadRequest(f"tools: the parameters of {quoted(function)}: {reason}") from None


class Field(NamedTuple):
    """An argument. ``types``: of the values that its schema allows."""

    name: str
    schema: Any
    kind: Kind
    types: frozenset[str]

    def ends(self, tags: FieldTags, style: Style) -> tuple[str, ...]:
        """Return the texts that may end this argument: models forget the line break after a text (Qwen3.6)."""
        is_free = self.kind != "json" and _text(self.schema, style) == _ANY_TEXT
        return (tags.after, tags.after.lstrip()) if is_free else (tags.after,)

    def value(self, text: str, style: Style) -> str:
        """Return, as JSON, the value of a text without quotes: its own, if it has one of ``types``, else a string."""
        listed = _values(self.schema) if "enum" in self.schema or "const" in self.schema else ()
        types = frozenset() if text in listed else self.types
        return _as_json(text, types, style)


def _as_json(text: str, types: Collection[str], style: Style) -> str:
    words = {} if style == "json" else NOTATIONS[style].words
    written = next((json.dumps(value) for value, spellings in words.items() if text in spellings), text)
    try:
        value = json.loads(written, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, str) or not set(_TYPES[type(value)]).intersection(types):
        return json.dumps(text, ensure_ascii=False)
    return written.strip()


_TYPES: dict[type, tuple[str, ...]] = {
    int: ("integer", "number"),
    float: ("number",),
    bool: ("boolean",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}
_ALL_TYPES = frozenset({"string"}.union(*_TYPES.values()))


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def fields(function: str, parameters: Mapping[str, Any]) -> Iterator[Field]:
    """Yield the arguments. Raises BadRequest for parameters that cannot be enforced."""
    properties, extra = parameters.get("properties", {}), parameters.get("additionalProperties", True)
    if not isinstance(extra, bool) and extra != {}:
        raise _unsupported(function, f"properties that are not listed by name ({quoted(extra)})")
    required = parameters.get("required", [])
    if missing := next((name for name in required if name not in properties), None):
        raise _unsupported(function, f"the required property {quoted(missing)}, which properties does not list")
    definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    schemas = _Schemas(function, parameters)
    for name, declared in properties.items():
        if not name or any(letter in "<>\"'=\n\x00" for letter in name):
            raise _unsupported(function, f"the property name {quoted(name)}")
        schema = schemas.resolved(declared)
        values = schemas.listed(schema)
        if values is not None:
            schema = {key: value for key, value in schema.items() if key not in _CHOICES} | {"enum": values}
        types = schemas.types(schema)
        kind: Kind = "json" if "string" not in types else "text" if types == {"string"} else "text or json"
        yield Field(name, {**schema, **definitions} if kind == "json" else schema, kind, types)


class _Schemas:
    """Reads the schemas of one function's arguments. ``root`` has the definitions that they refer to.

    References may share definitions, so results are kept by the id of a schema, and the steps are counted.
    """

    def __init__(self, function: str, root: Mapping[str, Any]) -> None:
        self._function = function
        self._root = root
        self._steps = 0
        self._kept: list[Mapping[str, Any]] = []  # so that no other schema gets the id of one of these
        self._known_types: dict[int, frozenset[str]] = {}
        self._known_values: dict[int, list[Any]] = {}

    def types(self, schema: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
        """Return the types that a schema names, or all if it names none."""
        if depth > _MOST_CHOICES:
            raise _unsupported(self._function, "a reference to itself")
        if id(schema) not in self._known_types:
            self._known_types[id(schema)] = self._types(schema, depth)
            self._kept.append(schema)
        return self._known_types[id(schema)]

    def _types(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        if "enum" in schema or "const" in schema:
            return frozenset(kind for value in _values(schema) for kind in _types_of(value))
        types = schema.get("type")
        if types is not None:
            named = frozenset({types} if isinstance(types, str) else types)
            return named | {"integer"} if "number" in named else named
        allowed = _ALL_TYPES
        for keyword in (*_CHOICES, "allOf"):
            if keyword in schema:
                kinds = [self.types(self.resolved(choice), depth + 1) for choice in schema[keyword]]
                allowed &= kinds[0].intersection(*kinds) if keyword == "allOf" else kinds[0].union(*kinds)
        return allowed

    def listed(self, schema: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
        """Return the values that a schema lists, also over choices of such schemas and null, or None if it does not."""
        if id(schema) not in self._known_values:
            values = self._listed(schema, depth)
            if values is None:  # maybe because of ``depth``; it ends the reading, so it need not be known
                return None
            self._known_values[id(schema)] = values
            self._kept.append(schema)
        return self._known_values[id(schema)]

    def _listed(self, schema: Mapping[str, Any], depth: int) -> list[Any] | None:
        types, keyword = schema.get("type"), next((key for key in _CHOICES if key in schema), None)
        if "enum" in schema or "const" in schema:
            values = _values(schema)
        elif types == "null":
            return [None]
        elif keyword is None or set(schema) - {keyword, "type", *_NOTES} or depth > _MOST_CHOICES:
            return None
        else:
            branches: list[dict[str, Any]] = []
            for choice in schema[keyword]:
                listed = self.listed(self.resolved(choice), depth + 1)
                if listed is None:
                    return None
                self._spend(len(listed))
                branches.append({_comparable(value): value for value in listed})
            counts = Counter(text for branch in branches for text in branch)
            merged = {text: value for branch in reversed(branches) for text, value in branch.items()}
            values = [merged[text] for text, count in counts.items() if keyword == "anyOf" or count == 1]
        allowed = {types} if isinstance(types, str) else set(types or _ALL_TYPES)
        return [value for value in values if allowed & _types_of(value)]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema with its reference to a definition, or the only schema of its allOf, in its place."""
        seen: set[str] = set()
        while isinstance(schema, Mapping) and ("$ref" in schema or (only := _only(schema)) is not None):
            self._spend(len(schema) + len(schema.get("allOf", ())))
            if "$ref" not in schema:
                schema = only
                continue
            target = schema["$ref"]
            parts = target.split("/") if isinstance(target, str) else []
            known = len(parts) == 3 and parts[0] == "#" and parts[1] in _DEFINITIONS and target not in seen
            if not known or parts[2] not in self._root.get(parts[1], {}) or set(schema) - {"$ref", *_NOTES}:
                what = f"the reference {quoted(target)}; only a definition in $defs can be named"
                raise _unsupported(self._function, what)
            seen.add(target)
            schema = self._root[parts[1]][parts[2]]
        if seen and isinstance(schema, Mapping):
            self._spend(sum(len(part) for part in (schema, *schema.values()) if isinstance(part, list | Mapping)))
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise _unsupported(self._function, f"a property with the schema {quoted(json.dumps(schema, default=str))}")
        return schema

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _unsupported(self._function, f"more than {_MOST_STEPS} references, choices and values in them")


def _comparable(value: Any) -> str:
    """Return a text that two values share if and only if JSON Schema calls them equal."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_whole), sort_keys=True)


def _whole(number: str) -> int | float:
    value = float(number)
    return int(value) if value.is_integer() else value


def _types_of(value: Any) -> set[str]:
    whole = isinstance(value, float) and value.is_integer()
    return {*_TYPES.get(type(value), ("string",)), *(("integer",) if whole else ())}


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return schema["enum"] if "enum" in schema else [schema["const"]]


def _text(schema: dict[str, Any], style: Style) -> dict[str, Any]:
    """Return the format of a text without quotes. It obeys what an expression says of ``schema``, else it is any."""
    if "enum" in schema or "const" in schema:
        words = None if style == "json" else NOTATIONS[style]
        texts = (
            each if isinstance(each, str) else words.spelled(each) if words else json.dumps(each)
            for each in _values(schema)
        )
        return _regex(f"(?:{'|'.join(map(_literal, texts))})")  # a group, because an expression may have few branches
    if schema.get("type") == "string":
        pattern, form = schema.get("pattern"), schema.get("format")
        with suppress(UnsupportedPattern):
            if isinstance(pattern, str):
                return _regex(patterns.as_pattern(patterns.search_expression(pattern)))
        if isinstance(form, str) and form in PATTERNS:
            return _regex(PATTERNS[form])
        least, most = (_counted(schema, key) for key in ("minLength", "maxLength"))
        if least is not None or most is not None:
            return _regex(f"[\\s\\S]{{{least or 0},{'' if most is None else most}}}")
    return _ANY_TEXT


def _counted(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Return the length under ``keyword``, or None if there is none that the grammar counts."""
    length = schema.get(keyword)
    return int(length) if isinstance(length, int | float) and length <= _LONGEST_TEXT else None


def _literal(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\^$.*+?()[]{}|/" else letter for letter in text)


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def _only(schema: Mapping[str, Any]) -> Any:
    """Return the only schema of an allOf that constrains anything, or None: pydantic writes a reference so."""
    others = [each for each in schema.get("allOf", ()) if not isinstance(each, dict) or set(each) - set(_NOTES)]
    return others[0] if len(others) == 1 and not set(schema) - {"allOf", *_NOTES} else None


def _unsupported(function: str, what: str) -> BadRequest:
    return BadRequest(
        f"tools: this model writes every argument on its own, and {quoted(function)} has {what}, which cannot be "
        "enforced so; rewrite the schema, or send tool_choice required"
    )
