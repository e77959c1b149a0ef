"""Negated keywords of names and conditions, against jsonschema."""

from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tests.plain.drawing import accepts, grammar_of
from tests.plain.test_schema_combinations import INTEGER, OBJECTS, STRING, decide

A, AB = {"a": INTEGER}, {"a": INTEGER, "b": INTEGER}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"oneOf": [{"properties": A, "additionalProperties": False}, {"properties": AB, "required": ["a"]}]},
            '{"a": 1, "b": 2}',
            '{"a": 1}',
        ),
        (
            {"properties": AB, "not": {"properties": A, "additionalProperties": STRING}},
            '{"a": 1, "b": 2}',
            '{"a": 1}',
        ),
        ({"properties": AB, "not": {"patternProperties": {"^b": STRING}}}, '{"b": 2}', '{"a": 1}'),
        ({"properties": AB, "not": {"propertyNames": {"enum": ["a"]}}}, '{"b": 2}', '{"a": 1}'),
        ({"properties": AB, "not": {"dependentRequired": {"a": ["b"]}}}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"properties": AB, "not": {"dependentSchemas": {"a": {"required": ["b"]}}}}, '{"a": 1}', "{}"),
        ({"properties": AB, "not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}, "{}", '{"a": 1}'),
        (
            {"properties": AB, "not": {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": False}},
            '{"a": 1}',
            '{"a": 1, "b": 2}',
        ),
    ],
)
def test_a_negated_keyword_of_names_is_enforced_for_the_described_names(schema: Any, good: str, bad: str) -> None:
    schema = {"type": "object", **schema}
    assert decide(schema, OBJECTS, closed=True)
    assert accepts(grammar_of(schema), good)
    assert not accepts(grammar_of(schema), bad)


def test_a_negated_keyword_of_names_is_rejected_where_any_name_is_possible() -> None:
    with pytest.raises(BadRequest, match="additionalProperties: its negation is not supported"):
        grammar_of({"type": "object", "not": {"additionalProperties": STRING}})


@pytest.mark.parametrize("keyword", ["contains", "uniqueItems"])
def test_a_negated_keyword_that_true_does_not_make_void_is_rejected(keyword: str) -> None:
    with pytest.raises(BadRequest, match=keyword):
        grammar_of({"type": "array", "not": {keyword: True}})


def test_literals_of_draft_04_obey_a_negated_bound() -> None:
    """The negation is written with keywords that draft-04 does not have."""
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "enum": [1, 5, "x"], "not": {"maximum": 3}}
    assert [accepts(grammar_of(schema), text) for text in ("1", "5", '"x"')] == [False, True, False]
