"""Keywords in combination: a grammar accepts exactly the values that are valid by jsonschema.

Each test draws a few keywords of one JSON type and decides every value of a small universe, so that neither a dropped
keyword nor a wrong bound can hide. The compiler may reject a schema, but only as unsupported: it says "no finite text
fits" only if no value of the universe is valid.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import combinations, permutations, product
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import BadRequest
from tests.plain.drawing import accepts, grammar_of

Schema = Any
NAMES = "abc"
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(len(NAMES) + 1)
    for names in combinations(NAMES, size)
    for values in product((1, 2, "x"), repeat=size)
]
ITEMS = (1, 2, "x")
ARRAYS = [list(items) for size in range(5) for items in product(ITEMS, repeat=size)]
NUMBERS = [number if number.is_integer() is False else int(number) for number in (k / 4 for k in range(-18, 39))]
STRINGS = ["".join(letters) for size in range(5) for letters in product("ab", repeat=size)]
ANY = [None, True, False, *NUMBERS[::5], *STRINGS[:7], *ARRAYS[:20], *OBJECTS[:20]]


def some(keywords: dict[str, st.SearchStrategy[Any]], least: int = 1, most: int = 4) -> st.SearchStrategy[Schema]:
    """Return schemas with ``least`` to ``most`` of the keywords, in a random order."""
    names = st.lists(st.sampled_from(sorted(keywords)), min_size=least, max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen}))


def merged(*schemas: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(*schemas).map(lambda parts: {key: value for part in parts for key, value in part.items()})


def conditional(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return ``if`` with ``then``, with ``else``, with both, or alone."""
    return merged(children.map(lambda child: {"if": child}), some({"then": children, "else": children}, 0, 2))


def in_combination(simple: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return schemas of one type together with keywords that apply other schemas of the type."""
    several = st.lists(simple, min_size=2, max_size=3)
    applied = some(
        {"allOf": several, "anyOf": several, "oneOf": several, "not": simple, "if": conditional(simple)}, 0, 2
    ).map(lambda schema: {**schema.pop("if", {}), **schema})
    return merged(simple, applied)


def texts(value: Any) -> Iterable[str]:
    """Yield JSON texts of a value: an object in each order of its names, a decimal with one and two decimals."""
    if isinstance(value, dict):
        yield from (json.dumps(dict(items)) for items in permutations(value.items()))
        return
    yield json.dumps(value)
    if isinstance(value, float):
        yield f"{value}0"  # a multiple of 0.25 has two decimals


def decide(schema: Schema, universe: list[Any], closed: bool = False, rejectable: Sequence[Any] = ()) -> bool:
    """Compare the grammar with jsonschema for each value of ``universe``, and return whether there is a grammar.

    With ``closed``, valid values may be rejected. Values of ``rejectable`` may be, too.
    """
    validator = jsonschema.Draft202012Validator(schema)
    try:
        grammar = grammar_of(schema, closed=closed)
    except BadRequest as error:
        if "no finite text fits" in str(error) and not closed:
            assert [value for value in universe if validator.is_valid(value)] == []
        return False
    verdicts = [
        (value, validator.is_valid(value), any(accepts(grammar, text) for text in texts(value))) for value in universe
    ]
    assert [value for value, valid, accepted in verdicts if accepted and not valid] == []
    if not closed:
        assert [
            value for value, valid, accepted in verdicts if valid and not accepted and value not in rejectable
        ] == []
    return True


exhaustive = settings(max_examples=90, deadline=None, suppress_health_check=list(HealthCheck))

leaves = st.sampled_from([True, False, {"const": 1}, {"type": "string"}, {"type": "integer"}, {"enum": ["x", 2]}])
names = st.sampled_from(NAMES)
name_lists = st.lists(names, min_size=1, max_size=2, unique=True)
simple_objects = some(
    {
        "required": name_lists,
        "properties": st.dictionaries(names, leaves, min_size=1, max_size=3),
        "minProperties": st.integers(0, 3),
        "maxProperties": st.integers(0, 3),
    },
    most=2,
)
objects = in_combination(
    some(
        {
            "required": name_lists,
            "properties": st.dictionaries(names, leaves, min_size=1, max_size=3),
            "additionalProperties": leaves,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^[bc]$", "d"]), leaves, min_size=1),
            "propertyNames": st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[ac]$"}, {"maxLength": 1}]),
            "dependentRequired": st.dictionaries(names, name_lists, min_size=1, max_size=3),
            "dependentSchemas": st.dictionaries(names, simple_objects | st.booleans(), min_size=1, max_size=3),
            "minProperties": st.integers(0, 4),
            "maxProperties": st.integers(0, 4),
        }
    )
)


# After a and c llguidance allows a comma, and then no name: the text is rejected, not an error.
NO_THIRD_NAME = {"type": "object", "propertyNames": {"pattern": "^[ac]$"}, "dependentRequired": {"a": ["a", "c"]}}


@exhaustive
@example(schema=NO_THIRD_NAME, closed=False)
@given(schema=objects.map(lambda schema: {"type": "object", **schema}), closed=st.booleans())
def test_keywords_of_objects(schema: Schema, closed: bool) -> None:
    decide(schema, OBJECTS, closed)


arrays = in_combination(
    some(
        {
            "prefixItems": st.lists(leaves, min_size=1, max_size=3),
            "items": leaves,
            "minItems": st.integers(0, 5),
            "maxItems": st.integers(0, 4),
            "uniqueItems": st.just(True),
            "contains": st.just(True) | st.just({}),
            "minContains": st.integers(0, 2),
        },
    )
)


REPEATING = [array for array in ARRAYS if len(set(array)) < len(array)]
CHOICES = ("anyOf", "oneOf", "not", "if", "then", "else")
LIST_OR_SET = {"type": "array", "anyOf": [{"minItems": 1}, {"minItems": 1, "uniqueItems": True}]}
LIST_OR_LONGER_SET = {"type": "array", "anyOf": [{"minItems": 1}, {"minItems": 2, "uniqueItems": True}]}


@exhaustive
@example(schema=LIST_OR_LONGER_SET)
@given(schema=arrays.map(lambda schema: {"type": "array", **schema}))
def test_keywords_of_arrays(schema: Schema) -> None:
    # An array that may be unique or not, by different branches, is unique: docs/structured.md.
    chosen = any("uniqueItems" in json.dumps(schema.get(keyword)) for keyword in CHOICES)
    decide(schema, ARRAYS, rejectable=REPEATING if chosen else ())


def test_a_list_or_a_set_of_the_same_items_may_repeat_them() -> None:
    assert decide(LIST_OR_SET, ARRAYS)


limits = st.integers(-3, 6) | st.sampled_from([-1.5, 0.25, 0.5, 2.25])
simple_numbers = some(
    {
        "type": st.sampled_from(["integer", "number"]),
        "minimum": limits,
        "maximum": limits,
        "exclusiveMinimum": limits,
        "exclusiveMaximum": limits,
        "multipleOf": st.sampled_from([0.25, 0.5, 0.75, 1, 1.5, 2, 3]),
        "enum": st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True),
        "const": st.sampled_from(NUMBERS),
    },
    most=3,
)


@exhaustive
@given(schema=in_combination(simple_numbers).map(lambda schema: {"type": "number", **schema}))
def test_keywords_of_numbers(schema: Schema) -> None:
    decide(schema, NUMBERS)


simple_strings = some(
    {
        "minLength": st.integers(0, 5),
        "maxLength": st.integers(0, 4),
        "pattern": st.sampled_from(["^a", "b$", "ab", "^(a|bb)*$", "^[ab]{2,3}$"]),
        "enum": st.lists(st.sampled_from(STRINGS), min_size=1, max_size=4, unique=True),
        "const": st.sampled_from(STRINGS),
    },
    most=3,
)


@exhaustive
@given(schema=in_combination(simple_strings).map(lambda schema: {"type": "string", **schema}))
def test_keywords_of_strings(schema: Schema) -> None:
    decide(schema, STRINGS)


kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
mixed = in_combination(
    merged(
        some({"type": st.sampled_from(kinds) | st.lists(st.sampled_from(kinds), min_size=1, unique=True)}, 0),
        some(
            {
                "minimum": limits,
                "multipleOf": st.sampled_from([0.5, 2]),
                "maxLength": st.integers(0, 2),
                "pattern": st.sampled_from(["^a", "b$"]),
                "maxItems": st.integers(0, 2),
                "items": leaves,
                "required": name_lists,
                "properties": st.dictionaries(names, leaves, min_size=1, max_size=2),
                "enum": st.lists(st.sampled_from(ANY), min_size=1, max_size=4, unique_by=json.dumps),
                "const": st.sampled_from(ANY),
            },
            0,
            3,
        ),
    )
)


@exhaustive
@given(schema=mixed)
def test_keywords_of_several_types(schema: Schema) -> None:
    decide(schema, ANY)


INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "universe"),
    [
        ({"if": {"required": ["a"]}, "else": {"required": ["b"]}}, OBJECTS),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, OBJECTS),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}, OBJECTS),
        ({"if": {"required": ["a"]}}, OBJECTS),
        ({"dependentRequired": {"a": ["b"], "b": ["c"]}}, OBJECTS),
        ({"dependentRequired": {"a": ["b", "c"]}}, OBJECTS),
        ({"dependentSchemas": {"a": {"required": ["b"]}, "b": {"required": ["c"]}}}, OBJECTS),
        ({"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": {"required": ["c"]}}}, OBJECTS),
        ({"properties": {"a": INTEGER, "b": INTEGER}, "patternProperties": {"^[ac]": {"minimum": 2}}}, OBJECTS),
        ({"properties": {"a": {}, "b": STRING}, "additionalProperties": False, "minProperties": 1}, OBJECTS),
        ({"prefixItems": [INTEGER], "items": STRING, "minItems": 3}, ARRAYS),
        ({"prefixItems": [True, False], "minItems": 1}, ARRAYS),
        ({"prefixItems": [INTEGER], "allOf": [{"prefixItems": [True, STRING]}]}, ARRAYS),
        ({"contains": True, "minContains": 2, "allOf": [{"minItems": 1}, {"maxItems": 3}]}, ARRAYS),
        ({"multipleOf": 2, "allOf": [{"multipleOf": 3}]}, NUMBERS),
        ({"multipleOf": 0.75, "allOf": [{"multipleOf": 0.5}, {"multipleOf": 2}]}, NUMBERS),
        ({"minimum": 2, "exclusiveMinimum": 1, "maximum": 4, "exclusiveMaximum": 5}, NUMBERS),
        ({"minimum": 1, "exclusiveMinimum": 2, "maximum": 5, "exclusiveMaximum": 4}, NUMBERS),
        ({"enum": [1, 2, 3, 4], "allOf": [{"enum": [2, 3, 4, 5]}, {"not": {"const": 3}}]}, NUMBERS),
        ({"pattern": "^a", "allOf": [{"pattern": "b$"}, {"pattern": "ba"}]}, STRINGS),
        ({"minLength": 2, "allOf": [{"minLength": 3}, {"maxLength": 3}, {"maxLength": 4}]}, STRINGS),
        ({"if": STRING, "else": {"type": "array", "maxItems": 1}}, ANY),
        ({"enum": [1, True, "a", [], {}], "not": {"const": True}}, ANY),
    ],
)
def test_a_supported_combination_is_exact(schema: Schema, universe: list[Any]) -> None:
    assert decide(schema, universe)
    assert any(jsonschema.Draft202012Validator(schema).is_valid(value) for value in universe)


BOUNDS = [-2, -1.25, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.25, 2]
ZEROS = ["0", "-0", "0.0", "-0.0", "0.00", "-0.00"]


@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
def test_two_bounds_of_decimals_are_exact(low: str, high: str) -> None:
    """With integers and fractions on both sides of zero. llguidance itself accepts 0 for 0 < x <= 0.5."""
    numbers = [k / 8 for k in range(-20, 21)]
    for least, most in combinations(BOUNDS, 2):
        schema = {"type": "number", low: least, high: most}
        grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
        for number in numbers:
            spellings = {f"{number:g}", f"{number:.4f}", json.dumps(number)} | ({*ZEROS} if number == 0 else set())
            accepted = {text for text in spellings if accepts(grammar, text)}
            assert bool(accepted) == validator.is_valid(number), (schema, number, accepted)


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, 2**58 - 1, 2**58 + 1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_bound_beyond_2_53_moves_inwards(keyword: str, bound: int, sign: int, kind: str) -> None:
    schema = {"type": kind, keyword: sign * bound}
    validator = jsonschema.Draft202012Validator(schema)
    grammar = grammar_of(schema)
    near, far = range(sign * bound - 300, sign * bound + 301), [sign * bound + more for more in (-(1 << 13), 1 << 13)]
    decided = [*near, *far] if bound < 2**53 else far
    assert [value for value in decided if accepts(grammar, str(value)) != validator.is_valid(value)] == []
    assert [value for value in near if not validator.is_valid(value) and accepts(grammar, str(value))] == []


@pytest.mark.parametrize("limits", [{}, {"exclusiveMinimum": 0}, {"minimum": -1}, {"maximum": 2.5}])
def test_a_decimal_multiple_may_be_written_with_fewer_decimals(limits: dict[str, float]) -> None:
    """llguidance itself writes 0.5 only as 0.50, and not even that where ``limits`` are near."""
    grammar = grammar_of({"type": "number", "multipleOf": 0.25, **limits})
    assert all(accepts(grammar, text) for text in ("0.25", "0.5", "1", "1.5", "1.75", "2.5"))
    assert not any(accepts(grammar, text) for text in ("0.2", "0.1", "0.3", "0.05", "1.1", "1.30"))


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^a": INTEGER}, "properties": {"b": STRING}, "additionalProperties": {"const": 1}},
        {"patternProperties": {"^a": INTEGER}, "properties": {"b.c": STRING}, "additionalProperties": {"const": 1}},
        {"patternProperties": {"^a": INTEGER}, "properties": {"$[b](c)": STRING}, "additionalProperties": INTEGER},
    ],
)
def test_a_property_has_only_its_own_schema_where_other_names_have_another(schema: Schema) -> None:
    name = next(iter(schema["properties"]))
    grammar = grammar_of(schema)
    assert accepts(grammar, json.dumps({name: "x", "a": 5, "z": 1}))
    assert not accepts(grammar, json.dumps({name: 1}))
    assert not accepts(grammar, json.dumps({name + "?": "x"}))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "patternProperties": {"^b": True},
            "allOf": [{"properties": {"b": True}, "additionalProperties": {"const": 1}}],
        },
        {
            "patternProperties": {"^a": True, "^b": True},
            "allOf": [{"properties": {"c": True, "b": True}, "additionalProperties": {"const": 1}}],
        },
        {"properties": {"b": True}, "propertyNames": {"pattern": "^b"}, "additionalProperties": {"const": 1}},
        {"properties": {"b": True}, "propertyNames": {"maxLength": 2}, "additionalProperties": {"const": 1}},
    ],
)
def test_a_pattern_for_other_names_that_matches_a_property_is_rejected(schema: Schema) -> None:
    with pytest.raises(BadRequest, match="a pattern that matches 'b' is not supported"):
        grammar_of(schema)


@pytest.mark.parametrize("further", [{"items": {"$ref": "#"}}, {"prefixItems": [INTEGER, {"$ref": "#"}]}])
@pytest.mark.parametrize(("least", "finite"), [(0, True), (1, True), (2, False)])
def test_an_array_that_requires_an_endless_item_is_rejected(further: Schema, least: int, finite: bool) -> None:
    """The first item is an integer. The second one, or each further one, is such an array again."""
    schema = {"type": "array", "prefixItems": [INTEGER], "minItems": least, "items": False, **further}
    if finite:
        grammar = grammar_of(schema)
        assert accepts(grammar, "[1, [3, [4]]]")
        assert accepts(grammar, "[1, [2], [3, [4]]]") == (further.get("items") is not None)
        assert accepts(grammar, "[]") == (least == 0)
    else:
        with pytest.raises(BadRequest, match="no finite text fits"):
            grammar_of(schema)
