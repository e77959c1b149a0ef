"""JSON Schema drafts: choose the draft of a schema, normalize its keywords to 2020-12, and detect misspelled ones."""

import difflib
from functools import cache
from typing import Any

import jsonschema

from tandemrt.engines.validation.errors import BadRequest, clipped
from tandemrt.runtime.grammars.regex.python_form import is_pattern
from tandemrt.runtime.grammars.schema.fast_validation import is_plain

Schema = dict[str, Any] | bool

DIALECTS: dict[str, type[jsonschema.protocols.Validator]] = {
    "draft-04": jsonschema.Draft4Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "2020-12": jsonschema.Draft202012Validator,
}
REF_STANDS_ALONE = ("draft-04", "draft-06", "draft-07")  # these dialects ignore the keywords next to $ref

STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format"})
MAX_NUMBER_BITS = 1024  # a larger integer does not fit a double
NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAY_KEYWORDS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
OBJECT_KEYWORDS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "unevaluatedProperties"}
)
IN_PLACE_APPLICATORS = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
DEPENDENT_KEYWORDS = frozenset({"dependentRequired", "dependentSchemas"})
SUPPORTED = (
    STRING_KEYWORDS
    | NUMBER_KEYWORDS
    | ARRAY_KEYWORDS
    | OBJECT_KEYWORDS
    | IN_PLACE_APPLICATORS
    | DEPENDENT_KEYWORDS
    | {"type", "const", "enum"}
)
UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
UNSUPPORTED = {
    "contains": "a required item is not supported; describe all items instead",
    "$recursiveRef": "dynamic references are not supported; use $ref",
}
_OLDER = frozenset({"dependencies", "additionalItems"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "minContains", "maxContains", "nullable"}
)
_NAMES = sorted(SUPPORTED | UNSUPPORTED.keys() | _OLDER)
_MIN_SIMILARITY = 0.85  # of difflib; allows one wrong letter in a name of seven

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "uniqueItems": True}
_SUBSCHEMA = {"anyOf": [{"type": "boolean"}, {"$ref": "#"}]}
_SUBSCHEMAS = {"type": "object", "additionalProperties": _SUBSCHEMA}
# Keywords that older metaschemas do not describe; they mean in older dialects what they mean in 2020-12.
_NEWER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$anchor", "$dynamicAnchor"), _TEXT),
    **dict.fromkeys(("if", "then", "else", "contains", "propertyNames", *UNEVALUATED), _SUBSCHEMA),
    **dict.fromkeys(("$defs", "dependentSchemas"), _SUBSCHEMAS),
    "prefixItems": {"type": "array", "minItems": 1, "items": _SUBSCHEMA},
    "dependentRequired": {"type": "object", "additionalProperties": _TEXTS},
}
_OLDER_FORMS = (["items"], ["exclusiveMinimum"], ["exclusiveMaximum"])


def dialect_of(schema: Schema) -> str:
    """Return the dialect that ``$schema`` names, or else the newest dialect in which the schema is valid.

    Raises:
        BadRequest: not a JSON schema; the message names the place.
    """
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"structured_outputs.json: a schema is an object or a boolean, got {type(schema).__name__}")
    named = schema.get("$schema") if isinstance(schema, dict) else None
    known = [name for name in DIALECTS if isinstance(named, str) and f"/{name}/" in named]
    if isinstance(named, str) and "/draft-03/" in named:
        raise BadRequest(
            "structured_outputs.json: $schema: draft-03 is not supported; write the schema in draft-07 or later"
        )
    if known:
        check_valid(schema, known[0])
        return known[0]
    error = _error(schema, "2020-12")
    if error is not None and list(error.absolute_path)[-1:] in _OLDER_FORMS:
        for older in ("draft-07", "draft-04"):
            if _error(schema, older) is None:
                return older
    _reject(error, "#")
    return "2020-12"


def check_valid(schema: Any, dialect: str, place: str = "#") -> None:
    """Raise BadRequest unless ``schema`` is valid in ``dialect``."""
    _reject(_error(schema, dialect), place)


def _reject(error: jsonschema.ValidationError | None, place: str) -> None:
    if error is not None:
        at = "/".join(map(str, (place, *error.absolute_path)))
        hint = "; a list of items is prefixItems since 2020-12" if list(error.absolute_path)[-1:] == ["items"] else ""
        raise BadRequest(f"structured_outputs.json: not a JSON schema at {at}: {clipped(error.message)}{hint}")


def keywords(schema: dict[str, Any], dialect: str) -> dict[str, Any]:
    """Return the keywords of a schema that constrain values, in their 2020-12 forms and in the given order."""
    if "$ref" in schema and dialect in REF_STANDS_ALONE:
        return {"$ref": schema["$ref"]}
    meant = {key: value for key, value in schema.items() if key in SUPPORTED or key in UNSUPPORTED}
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = schema.get(exclusive)
        if isinstance(flag, bool):  # draft-04
            del meant[exclusive]
            if flag and inclusive in meant:
                meant[exclusive] = meant.pop(inclusive)
    if isinstance(schema.get("items"), list):
        meant["prefixItems"] = meant.pop("items")
        if "additionalItems" in schema:
            meant["items"] = schema["additionalItems"]
    for name, needs in schema.get("dependencies", {}).items():
        key = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
        meant[key] = {**meant.get(key, {}), name: needs}
    return meant


@cache
def misspelled(keyword: str) -> str | None:
    """Return the keyword that ``keyword`` is probably a misspelling of, or None if it is an annotation."""
    if keyword in SUPPORTED or keyword in UNSUPPORTED or keyword in _OLDER or keyword in _ANNOTATIONS:
        return None
    if not keyword[:1].isalpha() or keyword.startswith("x-"):
        return None
    folded = {name.lower(): name for name in (*_NAMES, *sorted(_ANNOTATIONS))}
    near = difflib.get_close_matches(keyword.lower(), folded, n=1, cutoff=_MIN_SIMILARITY)
    return folded[near[0]] if near and folded[near[0]] in _NAMES else None


def _error(schema: Any, dialect: str) -> jsonschema.ValidationError | None:
    if is_plain(schema, dialect):
        return None
    try:
        errors = _meta_validator(DIALECTS[dialect]).iter_errors(schema)
        error: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(errors)
        return error.context[0] if error is not None and error.context else error  # the first form says what is missing
    except (RecursionError, OverflowError) as failure:  # raised by Python's `re` while it compiles a pattern
        raise BadRequest(
            f"structured_outputs.json: a pattern nests too deep or repeats too often: {clipped(failure)}; simplify it"
        ) from None


@cache
def _meta_validator(cls: type[jsonschema.protocols.Validator]) -> jsonschema.protocols.Validator:
    formats = jsonschema.FormatChecker(())
    formats.checkers = {**cls.FORMAT_CHECKER.checkers, "regex": (_is_pattern, ())}
    meta = dict(cls.META_SCHEMA)
    if cls is not jsonschema.Draft202012Validator:
        meta["properties"] = _NEWER | meta["properties"]
    return cls(meta, format_checker=formats)


def _is_pattern(text: object) -> bool:
    return not isinstance(text, str) or is_pattern(text)
