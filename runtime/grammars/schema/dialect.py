"""What the keywords of a schema mean: dialects by ``$schema``, older forms, no-ops, misspelled names."""

import difflib
from functools import cache
from typing import Any

import jsonschema

from tandemrt.engines.errors import BadRequest, clipped
from tandemrt.runtime.grammars.schema.forms import is_plain

Schema = dict[str, Any] | bool

_DIALECTS: dict[str, type[jsonschema.protocols.Validator]] = {
    "draft-04": jsonschema.Draft4Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "2020-12": jsonschema.Draft202012Validator,
}
REF_STANDS_ALONE = ("draft-04", "draft-06", "draft-07")  # there, what stands beside $ref is ignored

OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"})
OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "unevaluatedProperties"}
)
IN_PLACE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
DEPENDENT = frozenset({"dependentRequired", "dependentSchemas"})
MEANT = OF_STRINGS | OF_NUMBERS | OF_ARRAYS | OF_OBJECTS | IN_PLACE | DEPENDENT | {"type", "const", "enum"}
UNHELD = {
    "contains": "what a list must contain is not held; describe its items instead",
    "unevaluatedItems": "what other keywords leave over is not held; use items",
    "$recursiveRef": "references that depend on who refers are not held; use $ref",
}
_OLDER = frozenset({"dependencies", "additionalItems"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "minContains", "maxContains", "nullable"}
)
_NAMES = sorted(MEANT | UNHELD.keys() | _OLDER)
_ALIKE = 0.85  # of difflib's ratio: one letter more, less or changed in a name of seven


_OLDER_FORMS = (["items"], ["exclusiveMinimum"], ["exclusiveMaximum"])


def dialect_of(schema: Schema) -> str:
    """The dialect of a whole schema: the one that ``$schema`` names, or else the newest that finds it valid.

    Raises:
        BadRequest: it is no JSON schema, with the place.
    """
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"structured_outputs.json: a schema is an object or a boolean, got {type(schema).__name__}")
    named = schema.get("$schema") if isinstance(schema, dict) else None
    known = [name for name in _DIALECTS if isinstance(named, str) and f"/{name}/" in named]
    if isinstance(named, str) and "/draft-03/" in named:
        raise BadRequest(
            "structured_outputs.json: $schema: draft-03 is not read; write the schema in draft-07 or later"
        )
    if known:
        check_valid(schema, known[0])
        return known[0]
    error = _error(schema, "2020-12")
    if error is not None and list(error.absolute_path)[-1:] in _OLDER_FORMS:
        for older in ("draft-07", "draft-04"):
            if _error(schema, older) is None:
                return older
    _refuse(error, "#")
    return "2020-12"


def check_valid(schema: Any, dialect: str, place: str = "#") -> None:
    """Refuse what is no JSON schema of ``dialect``. Raises BadRequest."""
    _refuse(_error(schema, dialect), place)


def _refuse(error: jsonschema.ValidationError | None, place: str) -> None:
    if error is not None:
        at = "/".join(map(str, (place, *error.absolute_path)))
        hint = "; a list of items is prefixItems since 2020-12" if list(error.absolute_path)[-1:] == ["items"] else ""
        raise BadRequest(f"structured_outputs.json: not a JSON schema at {at}: {clipped(error.message)}{hint}")


def validator_of(dialect: str) -> type[jsonschema.protocols.Validator]:
    return _DIALECTS[dialect]


def keywords(schema: dict[str, Any], dialect: str) -> dict[str, Any]:
    """The keywords of one schema that mean something, in the forms of 2020-12, in their order. Subschemas stay."""
    if "$ref" in schema and dialect in REF_STANDS_ALONE:
        return {"$ref": schema["$ref"]}
    meant = {key: value for key, value in schema.items() if key in MEANT or key in UNHELD}
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
    """The keyword that ``keyword`` was probably meant to be, or None: any other name is an annotation."""
    if keyword in MEANT or keyword in UNHELD or keyword in _OLDER or keyword in _ANNOTATIONS:
        return None
    if not keyword[:1].isalpha() or keyword.startswith("x-"):
        return None
    folded = {name.lower(): name for name in (*_NAMES, *sorted(_ANNOTATIONS))}
    near = difflib.get_close_matches(keyword.lower(), folded, n=1, cutoff=_ALIKE)
    return folded[near[0]] if near and folded[near[0]] in _NAMES else None


def _error(schema: Any, dialect: str) -> jsonschema.ValidationError | None:
    if is_plain(schema, dialect):
        return None
    try:
        errors = _meta_validator(_DIALECTS[dialect]).iter_errors(schema)
        error: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(errors)
        return error
    except (RecursionError, OverflowError) as failure:  # of a pattern, as Python's own expressions are checked
        raise BadRequest(
            f"structured_outputs.json: a pattern nests too deep or repeats too often: {clipped(failure)}; simplify it"
        ) from None


@cache
def _meta_validator(cls: type[jsonschema.protocols.Validator]) -> jsonschema.protocols.Validator:
    return cls(cls.META_SCHEMA, format_checker=cls.FORMAT_CHECKER)
