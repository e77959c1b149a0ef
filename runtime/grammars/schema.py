"""Which JSON schemas a grammar enforces to the letter; the rest is refused by name (docs/design.md, section 5).

xgrammar accepts many keywords that it then ignores, alone or beside others. What is let through here was checked the
hard way: texts drawn from the grammar of a schema must validate against it (tests/plain/test_schema.py).
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema

from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation import MOST_LINES
from tandemrt.runtime.grammars.patterns import FORMATS, respelled, unenforceable

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
)
DEFINITIONS = frozenset({"$defs", "definitions"})
BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
CHOICES = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
LARGEST_EXACT = 2**53  # xgrammar reads numbers as doubles
LARGEST_BOUND, BOUND_DECIMALS = 1e9, 6  # of a `number`; beyond, its rules print the bound with an exponent and break

Schema = dict[str, Any] | bool


def check_valid(schema: Any) -> None:
    """Refuse what is no JSON schema (draft 2020-12). Raises BadRequest."""
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"structured_outputs.json: a schema is an object or a boolean, got {type(schema).__name__}")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "/".join(map(str, ("#", *error.absolute_path)))
        raise BadRequest(f"structured_outputs.json: not a JSON schema at {place}: {clipped(error.message)}") from None
    except (RecursionError, OverflowError) as error:  # of a pattern, as Python's own expressions are checked
        raise BadRequest(
            f"structured_outputs.json: a pattern nests too deep or repeats too often: {clipped(error)}; simplify it"
        ) from None


def check_enforceable(schema: Schema) -> None:
    """Refuse a valid schema that a grammar would not hold exactly, naming every keyword and its place.

    Raises:
        BadRequest: with one line per problem.
    """
    problems = list(Checker(schema).problems())
    if problems:
        lines = [f"- {problem}" for problem in problems[:MOST_LINES]]
        if len(problems) > MOST_LINES:
            lines.append(f"- and {len(problems) - MOST_LINES} more")
        raise BadRequest(
            "structured_outputs.json: the grammar cannot enforce\n"
            + "\n".join(lines)
            + "\nChange the schema, or set validate_output=True to have the finished text checked instead"
        )


def lowered(schema: Any) -> Any:
    """The schema a grammar is compiled from: formats spelled out as patterns, patterns as xgrammar reads them."""
    if isinstance(schema, list):
        return [lowered(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {
        key: {name: lowered(child) for name, child in value.items()}
        if key in ("properties", *DEFINITIONS) and isinstance(value, dict)
        else value
        if key in ("const", "enum", "default", "examples")
        else lowered(value)
        for key, value in schema.items()
    }
    name = copy.get("format")
    if isinstance(name, str) and name in FORMATS and "pattern" not in copy:
        del copy["format"]
        copy["pattern"] = f"^{FORMATS[name]}$"
    pattern = copy.get("pattern")
    if isinstance(pattern, str):
        copy["pattern"] = respelled(pattern)
    return copy


class Checker:
    """Walks what a grammar would be made of: the root and every schema it leads to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._seen: set[str] = set()

    def problems(self) -> Iterator[str]:
        yield from self._schema(self._root, "#")

    def _schema(self, schema: Any, place: str) -> Iterator[str]:
        if place in self._seen or not isinstance(schema, dict):
            return
        self._seen.add(place)
        chosen = [keyword for keyword in CHOICES if keyword in schema]
        if chosen:
            yield from self._choice(schema, chosen[0], place)
            return
        types = _types(schema)
        known = ANNOTATIONS | DEFINITIONS | {"type"}
        for kind in types:
            known |= BY_TYPE[kind]
        for keyword in schema:
            if keyword in known:
                continue
            if not types and any(keyword in keywords for keywords in BY_TYPE.values()):
                yield f"{place}/{keyword}: without a type the keyword is ignored; add the type"
            else:
                yield f"{place}/{keyword}: this keyword is ignored; leave it out"
        for kind, check in (
            ("string", self._string),
            ("number", self._number),
            ("integer", self._number),
            ("array", self._array),
            ("object", self._object),
        ):
            if kind in types:
                yield from check(schema, place)

    def _choice(self, schema: dict[str, Any], keyword: str, place: str) -> Iterator[str]:
        value = schema[keyword]
        yield from self._beside(schema, keyword, place)
        if keyword == "$ref":
            yield from self._reference(value, place)
        elif keyword in ("const", "enum"):
            yield from _literals(schema, [value] if keyword == "const" else value, f"{place}/{keyword}")
        else:
            if keyword == "allOf" and len(value) > 1:
                yield f"{place}/allOf: more than one branch is not enforced; merge them into one schema"
            if keyword == "oneOf" and not self._disjoint(value):
                yield f"{place}/oneOf: branches may overlap; use anyOf, or branches of different types"
            for index, branch in enumerate(value):
                yield from self._schema(branch, f"{place}/{keyword}/{index}")

    def _beside(self, schema: dict[str, Any], keyword: str, place: str) -> Iterator[str]:
        fine = ANNOTATIONS | DEFINITIONS | {keyword} | ({"type"} if keyword in ("const", "enum") else set())
        for other in schema:
            if other not in fine:
                yield f"{place}/{other}: beside {keyword} it is ignored; move it to where {keyword} leads"

    def _reference(self, reference: str, place: str) -> Iterator[str]:
        # Chains of references are followed here, so that one that only leads back to itself is seen.
        chain = []
        while True:
            if reference in chain:
                yield f"{place}/$ref: {quoted(reference)} only refers to itself; point it to a schema"
                return
            chain.append(reference)
            target = self._resolve(reference)
            if target is None:
                yield (
                    f"{place}/$ref: {quoted(reference)} is not a place in this schema such as '#/$defs/name'; inline it"
                )
                return
            if not (isinstance(target, dict) and "$ref" in target):
                break
            yield from self._beside(target, "$ref", reference)
            reference = target["$ref"]
        yield from self._schema(target, reference)

    def _resolve(self, reference: str) -> Any:
        if reference != "#" and (not reference.startswith("#/") or "~" in reference or "%" in reference):
            return None
        target: Any = self._root
        for step in reference.split("/")[1:]:
            if not isinstance(target, dict) or step not in target:
                return None
            target = target[step]
        return target if isinstance(target, dict | bool) else None

    def _disjoint(self, branches: list[Any]) -> bool:
        seen: set[str] = set()
        for branch in branches:
            types = _types(branch) if isinstance(branch, dict) else []
            kinds = {"number" if kind == "integer" else kind for kind in types}
            if not kinds or kinds & seen:
                return False
            seen |= kinds
        return True

    def _string(self, schema: dict[str, Any], place: str) -> Iterator[str]:
        shapes = [keyword for keyword in ("pattern", "format") if keyword in schema]
        for keyword in ("minLength", "maxLength", *shapes[1:]):
            if keyword in schema and shapes:
                yield f"{place}/{keyword}: beside {shapes[0]} it is ignored; put the length into the pattern"
        if "format" in schema and schema["format"] not in FORMATS:
            yield f"{place}/format: {quoted(schema['format'])} is not one of {', '.join(FORMATS)}; use a pattern"
        if "pattern" in schema and (reason := unenforceable(schema["pattern"])):
            yield f"{place}/pattern: {reason} is not enforced; rewrite the pattern without it"

    def _number(self, schema: dict[str, Any], place: str) -> Iterator[str]:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = schema.get(keyword)
            if bound is None or (isinstance(bound, int) and abs(bound) <= LARGEST_BOUND):
                continue
            if "integer" in _types(schema) or abs(bound) > LARGEST_BOUND or round(bound, BOUND_DECIMALS) != bound:
                rule = f"bounds of integers are integers, others have at most {BOUND_DECIMALS} decimals"
                yield f"{place}/{keyword}: {rule}, and all lie within ±{LARGEST_BOUND:.0f}; got {quoted(bound)}"
        multiple = schema.get("multipleOf")
        if multiple is not None and (_types(schema) != ["integer"] or not isinstance(multiple, int)):
            yield f"{place}/multipleOf: only an integer multiple of an integer is enforced; leave it out"

    def _array(self, schema: dict[str, Any], place: str) -> Iterator[str]:
        if schema.get("uniqueItems"):
            yield f"{place}/uniqueItems: repeated items are not refused; leave it out"
        if "items" in schema:
            yield from self._schema(schema["items"], f"{place}/items")
        for index, item in enumerate(schema.get("prefixItems", ())):
            yield from self._schema(item, f"{place}/prefixItems/{index}")

    def _object(self, schema: dict[str, Any], place: str) -> Iterator[str]:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", False)
        for name in schema.get("required", ()):
            if name not in properties:
                yield f"{place}/required: {quoted(name)} is not among the properties, so it is not demanded; declare it"
        if properties and more is not False:
            yield (
                f"{place}/additionalProperties: a declared property could be written again under an escaped name; "
                "set it to false"
            )
        if "minProperties" in schema and more is not False:
            yield f"{place}/minProperties: with additionalProperties a repeated name counts twice; leave it out"
        for name, child in properties.items():
            yield from self._schema(child, f"{place}/properties/{name}")
        yield from self._schema(more, f"{place}/additionalProperties")


def _types(schema: dict[str, Any]) -> list[str]:
    kinds = schema.get("type", "object" if "properties" in schema else [])
    return [kinds] if isinstance(kinds, str) else kinds


def _literals(schema: dict[str, Any], values: list[Any], place: str) -> Iterator[str]:
    types = {"type": schema["type"]} if "type" in schema else {}
    for value in values:
        if not jsonschema.Draft202012Validator(types).is_valid(value):
            yield f"{place}: {clipped(json.dumps(value))} is not of type {quoted(schema['type'])}; leave it out"
        if not _exact(value):
            yield f"{place}: {clipped(json.dumps(value))} holds a number that is not read exactly; write it as a string"


def _exact(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_exact, value.values()))
    if isinstance(value, list):
        return all(map(_exact, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= LARGEST_EXACT
