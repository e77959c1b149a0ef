"""Arguments of a tool call that are written one by one, as ``<parameter=NAME>VALUE</parameter>``.

A string is written without quotes, any other value as JSON or in another notation. A schema is rejected if the grammar
cannot enforce it on a string without quotes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandemrt.engines.text.formats import PATTERNS, UNSUPPORTED
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.grammars.notation import Style

Kind = Literal["text", "text or null", "json"]

_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_DEFINITIONS = ("$defs", "definitions")
_OBJECT = ("type", "properties", "required", "additionalProperties", "$schema", "$id", *_NOTES, *_DEFINITIONS)
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


def field_parts(tags: FieldTags, function: str, parameters: Mapping[str, Any], style: Style) -> list[dict[str, Any]]:
    """Return the parts of a structural tag for the arguments of ``function``, in the order of its properties.

    ``style`` is the notation of values that are not texts.

    Raises BadRequest for parameters that cannot be enforced in this form.
    """
    parts = []
    for name, schema, kind in fields(function, parameters):
        value = {"type": "json_schema", "json_schema": schema, "style": style}
        content = value if kind == "json" else _text(function, name, schema)
        tag = {"type": "tag", "begin": tags.begin(name, kind), "content": content, "end": tags.after}
        required = name in parameters.get("required", ())
        parts.append(tag if required else {"type": "optional", "content": tag})
    return parts


def fields(function: str, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any, Kind]]:
    """Yield name, schema and kind of every argument. Raises BadRequest for parameters that cannot be enforced."""
    if other := next((key for key in parameters if key not in _OBJECT), None):
        raise _unsupported(function, f"the keyword {quoted(other)} together with properties")
    properties, extra = parameters.get("properties", {}), parameters.get("additionalProperties", True)
    if not isinstance(properties, Mapping) or not isinstance(extra, bool):
        raise _unsupported(function, f"properties that are not listed by name ({quoted(extra)})")
    required = parameters.get("required", [])
    if missing := next((name for name in required if name not in properties), None):
        raise _unsupported(function, f"the required property {quoted(missing)}, which properties does not list")
    definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    for name, given in properties.items():
        if not name or any(letter in "<>\"'=\n\x00" for letter in name):
            raise _unsupported(function, f"the property name {quoted(name)}")
        schema = _resolved(function, given, parameters)
        kind = _kind(function, name, schema, parameters)
        yield name, (schema | definitions if kind == "json" else schema), kind


def _kind(function: str, name: str, schema: dict[str, Any], root: Mapping[str, Any]) -> Kind:
    if "enum" in schema or "const" in schema:
        types = {"string" if isinstance(each, str) else "json" for each in schema.get("enum", [schema.get("const")])}
    else:
        types = _types(function, schema, root)
    if types == {"string"} and not {"anyOf", "oneOf"} & set(schema):
        return "text"
    if "string" not in types:
        return "json"
    keywords = set(schema) - {*_NOTES}
    [*texts] = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    plain = len(texts) == 1 and _without_notes(_resolved(function, texts[0], root)) == {"type": "string"}
    if types == {"string", "null"} and (keywords == {"type"} or (keywords == {"anyOf"} and plain)):
        return "text or null"
    raise _unsupported(function, f"the property {quoted(name)}, which may be a text or another value")


def _types(function: str, schema: dict[str, Any], root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema allows, or all if it names none."""
    if depth > 16:
        raise _unsupported(function, "a reference to itself")
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return set(found)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [_resolved(function, each, root) for each in schema[keyword]]
            return {each for branch in branches for each in _types(function, branch, root, depth + 1)}
    return {"string", "json"}


def _text(function: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a text without quotes that obeys ``schema``."""
    limits = {key: value for key, value in _without_notes(schema).items() if key not in ("type", "anyOf")}
    form = limits.get("format")
    if isinstance(form, str) and form not in PATTERNS and form not in UNSUPPORTED:
        del limits["format"]  # an unknown format constrains nothing
    match limits:
        case {"enum": [_, *_] as words, **others} if not others:
            return _regex("|".join(map(_literal, words)))
        case {"const": str(word), **others} if not others:
            return _regex(_literal(word))
        case {"pattern": str(pattern), **others} if not others and _is_whole(pattern):
            return _regex(pattern)
        case {"format": str(form), **others} if not others and form in PATTERNS:
            return _regex(PATTERNS[form])
        case {"minLength": int() | float(), **others} | {"maxLength": int() | float(), **others} if not (
            set(others) - {"minLength", "maxLength"}
        ):
            least, most = limits.get("minLength", 0), limits.get("maxLength", "")
            if max(least, most or 0) <= _LONGEST_TEXT:
                return _regex(f"[\\s\\S]{{{int(least)},{most and int(most)}}}")
        case _ if not limits:
            return {"type": "any_text"}
    raise _unsupported(function, f"the text {quoted(name)} with {quoted(limits)}")


def _is_whole(pattern: str) -> bool:
    return pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$") and "|" not in pattern


def _literal(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\^$.*+?()[]{}|/" else letter for letter in text)


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _NOTES}


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def _resolved(function: str, schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its reference to a definition replaced by that definition."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and "$ref" in schema:
        target = schema["$ref"]
        parts = target.split("/") if isinstance(target, str) else []
        known = len(parts) == 3 and parts[0] == "#" and parts[1] in _DEFINITIONS and target not in seen
        if not known or parts[2] not in root.get(parts[1], {}) or set(schema) - {"$ref", *_NOTES}:
            raise _unsupported(function, f"the reference {quoted(target)}; only a definition in $defs can be named")
        seen.add(target)
        schema = root[parts[1]][parts[2]]
    if not isinstance(schema, Mapping):
        raise _unsupported(function, f"a property with the schema {quoted(json.dumps(schema, default=str))}")
    return dict(schema)


def _unsupported(function: str, what: str) -> BadRequest:
    return BadRequest(
        f"tools: this model writes every argument on its own, and {quoted(function)} has {what}, which cannot be "
        "enforced so; rewrite the schema, or send tool_choice required"
    )
