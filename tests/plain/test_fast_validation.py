"""A schema with one wrong keyword is rejected before it is read: by its metaschema, and never accepted quickly."""

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_specifications import REGISTRY

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.schema.dialect import DIALECTS, SUPPORTED, _meta_validator, check_valid
from tandemrt.runtime.grammars.schema.fast_validation import is_plain

BAD = {"minLength": -1}  # in every dialect
# One valid value of each form that a keyword may ask for, and the nearest values that are wrong.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 0.5, 0.0, "", "a", "a#b", "(", [], ["a"], ["a", "a"], ["a", 1], [1], [{}, {}], [{}, BAD],
    {}, BAD, {"a": {}, "b": {}}, {"a": {}, "b": BAD}, {"a": ["b"], "b": ["b"]}, {"a": ["b"], "b": ["c", "c"]},
    {"a": ["b"], "b": [1]}, {"a": {}, "(": {}}, {"a": {}, "b": 1}, [True, True], {"a": True, "b": {}}, "integer",
    ["integer", "null"], ["integer", "number!"], {"a": 1}, [1, "a", None, True], [1, 1.0], [None, None], [0, False],
    [2**64],
)  # fmt: skip
SLOW = {"$vocabulary", "$recursiveAnchor", "$recursiveRef"}  # left to the metaschema
KEYWORDS = {keyword for uri in REGISTRY for keyword in REGISTRY.contents(uri).get("properties", ())}


def accepted(dialect: str) -> Iterator[dict[str, Any]]:
    for keyword in sorted(KEYWORDS):
        for value in VALUES:
            if is_plain({keyword: value}, dialect):
                yield {keyword: value}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_that_is_accepted_quickly_is_valid(dialect: str) -> None:
    validator = _meta_validator(DIALECTS[dialect])
    assert [each for each in accepted(dialect) if not validator.is_valid(each)] == []


def test_every_keyword_is_accepted_quickly_with_some_value() -> None:
    assert {keyword for dialect in DIALECTS for schema in accepted(dialect) for keyword in schema} == KEYWORDS - SLOW


NEWER = {
    "draft-04": sorted({*SUPPORTED, "$dynamicAnchor", "$defs"} - DIALECTS["draft-04"].META_SCHEMA["properties"].keys()),
    "2019-09": ["prefixItems", "$dynamicRef", "$dynamicAnchor"],
}


@pytest.mark.parametrize(("dialect", "keyword"), [(each, keyword) for each in NEWER for keyword in NEWER[each]])
def test_a_keyword_that_is_newer_than_the_dialect_has_the_form_of_the_newest(dialect: str, keyword: str) -> None:
    """It has its meaning there, too, so a wrong value would fail later, in our code."""
    newest, wrong = _meta_validator(DIALECTS["2020-12"]), []
    for value in VALUES:
        if not newest.is_valid({keyword: value}) and not isinstance(value, str):
            wrong.append(value)
            with pytest.raises(BadRequest, match="not a JSON schema"):
                check_valid({keyword: value}, dialect)
    assert wrong or keyword == "const"
