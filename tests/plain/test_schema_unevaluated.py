"""unevaluatedProperties and unevaluatedItems next to every other keyword: no invalid value is accepted."""

from contextlib import suppress
from itertools import filterfalse
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import BadRequest
from tests.plain.drawing import accepts, grammar_of
from tests.plain.test_schema_combinations import (
    ARRAYS,
    OBJECTS,
    Schema,
    arrays,
    conditional,
    decide,
    leaves,
    merged,
    objects,
    some,
    texts,
)

drawn = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
NUMBER = {"type": "integer"}
A, B, C = ({"properties": {name: NUMBER}, "required": [name]} for name in "abc")


def nested(simple: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return schemas that apply others, two levels deep, by every keyword that does so for the same value."""
    inner = merged(simple, _applying(simple))
    return merged(inner, _applying(inner), st.fixed_dictionaries({"$defs": st.fixed_dictionaries({"x": simple})}))


def _applying(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(children, min_size=1, max_size=3)
    keywords = {"allOf": several, "anyOf": several, "oneOf": several, "not": children, "if": conditional(children)}
    keywords |= {
        "$ref": st.just("#/$defs/x"),
        "$dynamicRef": st.just("#/$defs/x"),
        "dependentSchemas": st.fixed_dictionaries({"a": children}),
    }
    return some(keywords, 0, 2).map(lambda schema: {**schema.pop("if", {}), **schema})


def reject_invalid(schema: Schema, universe: list[Any], closed: bool) -> None:
    """Check that the grammar accepts no invalid value.

    It rejects some valid ones: if two alternatives match a value, the names of both are evaluated, and the grammar
    writes those of one.
    """
    with suppress(BadRequest):
        grammar = grammar_of(schema, closed=closed)
        accepted = [value for value in universe if any(accepts(grammar, text) for text in texts(value))]
        assert [*filterfalse(jsonschema.Draft202012Validator(schema).is_valid, accepted)] == []


@drawn
@given(schema=nested(objects), others=leaves, closed=st.booleans())
def test_a_name_that_no_matching_schema_describes_obeys_unevaluated_properties(
    schema: Schema, others: Schema, closed: bool
) -> None:
    reject_invalid({"unevaluatedProperties": others, **schema}, OBJECTS[:37], closed)


@drawn
@given(schema=nested(arrays), others=leaves)
def test_an_item_that_no_matching_schema_describes_obeys_unevaluated_items(schema: Schema, others: Schema) -> None:
    reject_invalid({"unevaluatedItems": others, **schema}, ARRAYS, closed=True)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {"c": {}},
            "oneOf": [{**A, "properties": {"a": {"const": 1}}}, {**B, "properties": {"b": {"const": 2}}}],
        },
        {"properties": {"c": {}}, "oneOf": [A, {"required": ["b"], "properties": {"a": False, "b": {}}}]},
        {**A, "properties": {"a": {}, "b": {}}},
        {"required": ["a"]},
        {"allOf": [A, B]},
        {"$ref": "#/$defs/a", "$defs": {"a": A}},
        {"if": A, "then": B, "else": C},
        {"if": A, "then": B},
        {"properties": {"a": NUMBER, "b": NUMBER}, "not": {"required": ["a", "b"]}},
        {"properties": {"a": NUMBER}, "not": B},
        {"not": {"not": A}},
        {"not": {"$ref": "#/$defs/n"}, "$defs": {"n": {"not": {"$ref": "#/$defs/a"}}, "a": A}},
        {"properties": {"a": NUMBER}, "dependentSchemas": {"a": B}},
        {"patternProperties": {"^[ab]$": NUMBER}},
        {"allOf": [{"additionalProperties": NUMBER}]},
    ],
)
@pytest.mark.parametrize("others", [False, {"const": 2}])
def test_evaluated_names_are_those_of_jsonschema(schema: dict[str, Any], others: Schema) -> None:
    assert decide({"unevaluatedProperties": others, **schema}, OBJECTS)


@pytest.mark.parametrize(
    "schema",
    [
        {"prefixItems": [NUMBER]},
        {"items": NUMBER},
        {"allOf": [{"prefixItems": [NUMBER]}, {"prefixItems": [{}, {"type": "string"}]}]},
        {"allOf": [{"items": NUMBER}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"prefixItems": [NUMBER]}}},
        {"if": {"minItems": 2}, "then": {"prefixItems": [{}, NUMBER]}, "else": {"items": {}}},
        {"minItems": 1},
    ],
)
@pytest.mark.parametrize("others", [False, {"const": 2}, True])
def test_evaluated_items_are_those_of_jsonschema(schema: dict[str, Any], others: Schema) -> None:
    whole = {"type": "array", "unevaluatedItems": others, **schema}
    assert decide(whole, ARRAYS) == any(map(jsonschema.Draft202012Validator(whole).is_valid, ARRAYS))
