"""Every beginning that a grammar writes can be continued to a valid text."""

import random
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tests.plain.drawing import grammar_of, write
from tests.plain.test_schema_combinations import ARRAYS, INTEGER, STRING, decide

Schema = Any


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^[ac]$"}, "dependentRequired": {"a": ["a", "c"]}},
        {"properties": {"a": True, "c": True}, "propertyNames": {"pattern": "^(a|c)$"}, "additionalProperties": True},
        {"required": ["a", "c"], "patternProperties": {"^[ac]$": INTEGER}},
    ],
)
def test_a_comma_is_not_written_after_the_last_possible_name(schema: Schema) -> None:
    matcher = grammar_of({"type": "object", **schema}).matcher()
    assert all(map(matcher.accept, b'{"a": 1, "c": 1'))
    assert not matcher.accept(ord(","))


@pytest.mark.parametrize(
    ("first", "rest", "least"),
    [
        ([{"enum": [1, 2]}, {"const": 1}], {"enum": [1, 2, "x"]}, 3),
        ([{"const": 1}, {"const": 1}], True, 0),
        ([{"enum": [1, 2]}, {"enum": [2, "x"]}, {"enum": [1, "x"]}], False, 3),
        ([STRING], {"enum": [1, 2]}, 3),
    ],
)
def test_an_array_of_unique_items_leaves_a_value_for_each_required_item(
    first: list[Schema], rest: Schema, least: int
) -> None:
    schema = {"type": "array", "prefixItems": first, "items": rest, "minItems": least, "uniqueItems": True}
    assert decide(schema, ARRAYS)
    grammar = grammar_of(schema)
    for seed in range(20):
        write(grammar, random.Random(seed))  # it asserts that a row is not empty


def test_an_array_that_may_need_a_used_value_is_rejected() -> None:
    with pytest.raises(BadRequest, match="#/uniqueItems: the 1 values of item 1 may all be in earlier items"):
        grammar_of({"type": "array", "prefixItems": [STRING, {"const": "a"}], "minItems": 2, "uniqueItems": True})
