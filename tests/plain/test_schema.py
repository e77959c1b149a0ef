"""A JSON schema is either rejected with keyword and path, or every text of its grammar validates (jsonschema)."""

import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.formats import PATTERNS
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.schema.emit import enforceable, relaxed
from tandemrt.runtime.grammars.schema.spelling import spelling_warnings
from tandemrt.runtime.grammars.sources import read
from tests.plain.constraints import compiler
from tests.plain.drawing import accepts, grammar_of, write

INTEGER, BOOLEAN, STRING = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INTEGER, "b": BOOLEAN}}


# Regressions: schemas whose grammar once accepted invalid texts.


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0, "multipleOf": 10}, "25"),
        ({"type": "integer", "multipleOf": 1025}, "8"),
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "object", "properties": {"b": {"type": "integer"}}},
                    "a/properties/b": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
                },
            },
            '{"a/properties/b": [1, 1]}',
        ),
        (
            {
                "$id": "http://x/root",
                "type": "object",
                "properties": {
                    "p": {
                        "$id": "/sub",
                        "type": "object",
                        "properties": {"q": {"$ref": "#/properties/z"}, "z": STRING},
                    },
                    "z": INTEGER,
                },
            },
            '{"p": {"q": 1}}',
        ),
        ({"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 0.500001}, ""),
        (
            {
                "type": "object",
                "properties": {"x": {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 0.500001}},
            },
            '{"x": }',
        ),
        (
            {"$defs": {"g": {"default": {"type": "string", "format": "date"}}}, "$ref": "#/$defs/g/default"},
            '"2021-02-29"',
        ),
        ({"type": "string"}, b'"\xed\xa0\x80"'),
        ({"type": "object"}, b'{"\xed\xa0\x80": 1}'),
        ({"type": "string", "maxLength": 1}, b'"\xed\xa0\x80"'),
        ({"type": "string", "pattern": "^.$"}, b'"\xe0\x80\x80"'),
        ({"type": "string", "pattern": "^[^a]$"}, b'"\xf0\x80\x80\x80"'),
        ({"type": "string"}, '"\\ud800"'),
        ({"type": "string"}, '"\\udc00\\ud800"'),
        ({"type": "string", "maxLength": 2}, '"\\ud800a"'),
        ({"type": "object"}, '{"\\ud800": 1}'),
        # of llguidance 1.9.1
        ({"type": "string", "pattern": '^[^"]*$'}, '"\\""'),
        ({"type": "string", "pattern": r"^[^\\]+$"}, r'"a\\"'),
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, '{"\\u0061": "x"}'),
        ({"type": "object", "properties": {"é": INTEGER}, "additionalProperties": True}, '{"\\u00e9": "x"}'),
        ({"type": "object", "properties": {'"': INTEGER}, "additionalProperties": True}, '{"\\u0022": "x"}'),
        ({"type": "string", "format": "date-time"}, '"2021-02-29T00:00:00Z"'),
        ({"type": "string", "format": "time"}, '"00:00:60Z"'),
    ],
)
def test_texts_that_violate_a_schema_are_rejected(schema, text):
    assert not accepts(grammar_of(schema), text)


def test_a_surrogate_pair_is_one_character():
    grammar = grammar_of({"type": "string", "maxLength": 1})
    assert accepts(grammar, '"\\ud83d\\ude00"')
    assert not accepts(grammar, '"\\ud83d\\ude00a"')


# Random schemas that are accepted.

keys = st.sampled_from(["a", "b", "format", 'q"\\', "é"])
bounds = st.integers(-30, 300)


def bounds_in_order(low, high):
    return lambda kw: low not in kw or high not in kw or kw[low] <= kw[high]


def numbers(values):
    fields = {"minimum": values, "maximum": values}
    return st.fixed_dictionaries({}, optional=fields).filter(bounds_in_order("minimum", "maximum"))


lengths = st.fixed_dictionaries({}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(0, 6)}).filter(
    bounds_in_order("minLength", "maxLength")
)
patterns = st.sampled_from(
    ["^[a-c]+$", "^a|bc$", "x{2,3}y?", "^(?:ab|c)*d+?$", r"^\d{4}-\w$", "^[^x]{1,3}$", ".{2}", ""]
)
literals = st.sampled_from([1, -2, 0, 1.5, True, None, "", 'a"\\\n', "é😀", {"a": [1, "b"]}, []])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    lengths.map(lambda kw: {"type": "string", **kw}),
    patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(sorted(PATTERNS)).map(lambda name: {"type": "string", "format": name}),
    numbers(bounds).map(lambda kw: {"type": "integer", **kw}),
    st.sampled_from([2, 7, 10]).map(lambda n: {"type": "integer", "multipleOf": n}),
    numbers(bounds | st.integers(-5000, 5000).map(lambda n: n / 100)).map(lambda kw: {"type": "number", **kw}),
    literals.map(lambda value: {"const": value}),
    st.lists(literals, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.just({"type": ["string", "null"], "maxLength": 3, "description": "at most three"}),
    st.just({"$ref": "#/$defs/shared"}),
)


def branches(children):
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": children},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)},
    )
    pairs = st.lists(children, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    objects = st.dictionaries(keys, children, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties)},
            optional={
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
                "additionalProperties": st.just(False),
                "maxProperties": st.integers(len(properties), 4),
            },
        )
    )
    maps = children.map(lambda child: {"type": "object", "additionalProperties": child, "maxProperties": 2})
    unions = st.lists(children, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas, "title": "one of them"})
    alone = children.map(lambda child: {"allOf": [child]})
    either = st.just({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}]})
    return arrays | pairs | objects | maps | unions | alone | either | any_keywords(children)


def any_keywords(children):
    """Any combination of keywords. Combinations that cannot be enforced must be rejected, the rest must be sound."""
    some = st.lists(children, min_size=1, max_size=2)
    named = st.dictionaries(keys, children, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "integer", "string", ["object", "null"], ["array", "number"]]),
            "properties": named,
            "required": st.lists(keys, max_size=2, unique=True),
            "additionalProperties": st.booleans() | children,
            "patternProperties": st.dictionaries(st.sampled_from(["^x", "a", '^[^"]$', "b$"]), children, max_size=2),
            "propertyNames": st.sampled_from([{"maxLength": 2}, {"enum": ["a", "c"]}, {"pattern": "^[ab]"}, False]),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
            "dependentRequired": st.just({"a": ["b"]}),
            "dependentSchemas": st.dictionaries(keys, children, max_size=1),
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
            "not": children | st.just({"required": ["a"]}) | patterns.map(lambda pattern: {"pattern": pattern}),
            "if": children | st.just({"properties": {"a": {"const": 1}}, "required": ["a"]}),
            "then": children,
            "else": children,
            "minimum": bounds,
            "multipleOf": st.sampled_from([0.1, 0.25, 3, 7]),
            "minLength": st.integers(0, 2),
            "pattern": patterns,
            "items": children,
            "uniqueItems": st.just(True),
            "maxItems": st.integers(0, 3),
            "contains": st.just(True),
            "x-vendor": st.just(1),
        },
    )


schemas = st.recursive(leaves, branches, max_leaves=6).map(
    lambda schema: {"$defs": {"shared": {"type": "integer", "minimum": 0}}, "allOf": [schema]}
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, closed=st.booleans(), seed=st.integers(0, 2**32))
def test_every_text_of_an_enforceable_schema_validates(schema, closed, seed):
    assume(is_enforceable(schema, closed))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date", "ipv4"]))
    chance = random.Random(seed)
    grammar = grammar_of(schema, closed=closed)
    for _ in range(4):
        text = write(grammar, chance)
        if text is not None:
            validator.validate(json.loads(text))


def is_enforceable(schema, closed) -> bool:
    try:
        grammar_of(schema, closed=closed)
    except BadRequest:
        return False
    return True


def neighbours(value):
    """Yield values one small change away from ``value``, at the top or anywhere inside."""
    yield from (other for other in (None, True, 0, "", [], {}) if other != value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value - 1, value + 1, value + 0.5, -value, 1000 * value)
    elif isinstance(value, str):
        yield from (value[:-1], value[1:], value + "a", value + value[-1:], value + "é", value.swapcase())
    elif isinstance(value, list):
        yield from ([*value, *(value[-1:] or [0])], value[::-1])
        for i, item in enumerate(value):
            yield value[:i] + value[i + 1 :]
            yield from ([*value[:i], near, *value[i + 1 :]] for near in neighbours(item))
    elif isinstance(value, dict):
        yield from (value | {"more": 0}, dict(reversed(value.items())))
        for key, item in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield from (value | {key: near} for near in neighbours(item))


def misspelled(text: str, chance: random.Random) -> str:
    """Return ``text`` with one character added, removed or replaced."""
    at, letter = chance.randrange(len(text)), chance.choice('0123456789-+.eE"\\{}[],: atnx\n')
    return text[:at] + chance.choice(["", letter, letter + text[at], text[at] * 2]) + text[at + 1 :]


def judge(schema, chance: random.Random, closed=True):
    """Yield texts near those of the grammar, each with its validity (jsonschema) and whether the grammar accepts it.

    The texts include two texts of the grammar itself, if it found an end.
    """
    validator, grammar = jsonschema.Draft202012Validator(schema), grammar_of(schema, whitespace="any", closed=closed)

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    def valid(text):
        try:
            return validator.is_valid(json.loads(text, parse_constant=refuse))
        except ValueError:
            return False
        except OverflowError:
            return None  # jsonschema overflows when it divides a very large number

    for written in (write(grammar, chance) for _ in range(2)):
        if written is None:
            continue
        text = written.decode()
        near = [json.dumps(other, ensure_ascii=chance.random() < 0.5) for other in neighbours(json.loads(text))]
        texts = [text, *chance.sample(near, min(20, len(near))), *(misspelled(text, chance) for _ in range(12))]
        yield from ((each, is_valid, accepts(grammar, each)) for each in texts if (is_valid := valid(each)) is not None)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, closed=st.booleans(), seed=st.integers(0, 2**32))
def test_nearly_valid_texts_that_violate_the_schema_are_rejected(schema, closed, seed):
    """Nearly valid: a text of the grammar with one change of value or spelling."""
    assume(is_enforceable(schema, closed))
    assert [text for text, valid, taken in judge(schema, random.Random(seed), closed) if taken and not valid] == []


def test_neighbour_texts_include_valid_and_invalid_ones():
    """Control for the test above: many neighbours are valid and accepted, and many are neither."""
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 20},
            "s": {"type": "string", "minLength": 1, "maxLength": 3},
            "l": {"type": "array", "items": BOOLEAN, "minItems": 1, "maxItems": 3},
        },
        "required": ["n", "s", "l"],
        "additionalProperties": False,
    }
    verdicts = [(valid, taken) for seed in range(20) for _, valid, taken in judge(schema, random.Random(seed))]
    assert verdicts.count((False, True)) == 0
    assert verdicts.count((True, True)) > len(verdicts) / 8
    assert verdicts.count((False, False)) > len(verdicts) / 8


@pytest.mark.parametrize("schema", [5, [], "x", None])
def test_a_value_that_is_no_schema_is_rejected(schema):
    with pytest.raises(BadRequest, match="a schema is an object or a boolean"):
        enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": 5}, "#/type"),
        ({"properties": {"a": {"minLength": -1}}}, "#/properties/a/minLength"),
        ({"enum": 1}, "#/enum"),
        ({"type": "array", "prefixItems": {}}, "#/prefixItems"),
        (
            {"$ref": "#/else/more/1", "else": {"more": [0, {"properties": {"a": {"type": 5}}}]}},
            "#/else/more/1/properties/a/type",
        ),
    ],
)
def test_an_invalid_schema_is_rejected_with_its_path(schema, place):
    with pytest.raises(BadRequest, match=f"not a JSON schema at {place}:"):
        enforceable(schema)


def check_texts(schema, good, bad, closed=True):
    """Check that the grammar accepts all of ``good`` and none of ``bad``, and that jsonschema agrees."""
    grammar = grammar_of(schema, closed=closed)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value in good:
        assert judge.is_valid(value), value
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not judge.is_valid(value), value
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value


A, B = {"required": ["a"]}, {"required": ["b"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": STRING}, "required": ["kind"]}
DRAFT4, DRAFT7 = ({"$schema": f"http://json-schema.org/draft-0{n}/schema#"} for n in (4, 7))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # keywords without effect
        (
            {"type": "integer", "x-order": 1, "example": 5, "readonly": True, "minLength": 3, "format": "int32"},
            [7],
            ["a"],
        ),
        ({"type": "string", "_format": "date", "contentEncoding": "base64", "format": "color"}, ["red"], [1]),
        ({"minimum": 5}, [5, "a", None, [1], {"a": 1}], [4]),
        ({**DRAFT4, "enum": [1, 5, 9], "not": {"minimum": 5}}, [1], [5, 9]),
        ({"enum": [2.0**53, -(2**53)]}, [2**53, -(2**53)], [2**53 - 1]),
        # keywords of a type without "type" apply to values of that type
        ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[]]),
        ({"type": "array", "maxItems": 2}, [[], [1, "a"]], [[1, 2, 3]]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": {}, "c": 1}], [{}, {"c": 1}]),
        ({"$defs": {"o": {"type": "object"}}, "$ref": "#/$defs/o"}, [{}, {"a": 1}], [1]),
        # objects with declared properties have no other names
        (AB, [{"a": 1, "b": True}, {}], [{"a": "x"}]),
        ({**AB, "required": ["z"]}, [{"a": 1, "z": "any"}], [{"a": 1}]),
        ({**AB, "additionalProperties": STRING}, [{"a": 1, "c": "x"}, {"ab": "y"}], [{"c": 1}, {"a": "x"}]),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, [{"xa": 1}, {}], [{"xa": "s"}]),
        (
            {**AB, "patternProperties": {"^x": STRING}, "additionalProperties": False},
            [{"a": 1, "x1": "s"}],
            [{"x1": 1}, {"c": 1}],
        ),
        (
            {"properties": {"xa": {"minimum": 3}}, "patternProperties": {"^x": INTEGER}},
            [{"xa": 3}],
            [{"xa": 2}, {"xa": "s"}],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
            [{"b": 1}],
            [{"c": 1}],
        ),
        (
            {"patternProperties": {"^x": INTEGER, "^y": STRING}, "additionalProperties": BOOLEAN},
            [{"x": 1}, {"y": "s", "z": True}, {"": False, "\n": True, "ax": True}],
            [{"x": True}, {"y": True}, {"z": 1}],
        ),
        ({"patternProperties": {"a?": INTEGER}, "additionalProperties": STRING}, [{"a": 1}], [{"a": "s"}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}, {}], [{"abc": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"a1": 1}]),
        ({**AB, "minProperties": 1}, [{"a": 1}, {"b": True}, {"a": 1, "b": False}], [{}]),
        ({**AB, "maxProperties": 1}, [{}, {"a": 1}, {"b": True}], [{"a": 1, "b": False}]),
        ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
        ({**AB, "dependentRequired": {"a": ["b"]}}, [{"b": True}, {"a": 1, "b": True}], [{"a": 1}]),
        ({**AB, "dependentSchemas": {"a": B}}, [{"b": True}, {"a": 1, "b": True}], [{"a": 1}]),
        ({**AB, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
        (
            {**AB, "anyOf": [A, B], "dependentSchemas": {"a": {"properties": {"b": {"not": {}}}}}},
            [{"a": 1}, {"b": True}],
            [{}, {"a": 1, "b": True}],
        ),
        ({**AB, "anyOf": [A, B], "dependentRequired": {"b!-a": ["a"]}}, [{"b": True}], [{}]),
        # arrays
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [[], ["b", "a"]], [["a", "a"]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [3]], [[1, 1]]),
        ({"type": "array", "contains": {}}, [[1]], [[]]),
        ({"type": "array", "items": BOOLEAN, "minItems": 5000, "maxItems": 5000}, [[True] * 5000], [[True] * 5001]),
        ({"type": "array", "prefixItems": [INTEGER], "items": STRING}, [[], [1, "a"]], [["a"], [1, 2]]),
        # numbers
        ({"type": "number", "multipleOf": 0.5}, [1.5, 2, -0.5], [0.3]),
        ({"type": "integer", "multipleOf": 10_000}, [20_000], [5_000]),
        ({"type": "integer", "multipleOf": 9_999_000}, [9_999_000], [9_999]),  # 9,999 remainders
        ({"type": "integer", "minimum": 3, "maximum": 20, "multipleOf": 7}, [7, 14], [0, 21, 8]),
        ({"type": "integer", "not": {"const": 5}}, [4, 6, 55], [5]),
        ({"type": "number", "maximum": 9223372036854775807}, [5, 9.0e15], [9223372036854775808]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**62), 0, 2**62], [2**63]),  # an int64
        ({"type": "number", "minimum": -(2.0**128), "maximum": 2.0**128}, [-(2**62), 0.5, 2**62], [10**39]),
        ({"type": "number", "exclusiveMinimum": -(10**400)}, [-(2**62), 0.5], [-(10**401)]),
        ({"type": "integer", "minimum": 3, "maximum": 2**64}, [3, 2**62], [2, 2**64 + 1]),
        # strings
        ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 2}, ["ab"], ["abc", ""]),
        ({"type": "string", "pattern": "^(?=a)b$|c"}, ["c", "ac"], ["b"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc", 'x"b\\\n'], ["ac"]),
        ({"type": "string", "format": "date", "pattern": "^20"}, ["2024-02-29"], ["1999-01-01"]),
        ({"type": "string", "not": {"enum": ["a", "ab"]}}, ["", "b", "aba", 'a"'], ["a", "ab"]),
        ({"type": "string", "minLength": 1, "not": {"maxLength": 2}}, ["abc"], ["ab", ""]),
        ({"type": "string", "not": {"pattern": "^a|b"}}, ["", "ca", 'c"\\\n'], ["a", "cb"]),
        ({"not": {"pattern": "b"}}, ["a"], ["b", 1]),
        ({"type": "string", "not": {"pattern": "b"}, "maxLength": 2}, ["ac"], ["ab", "acc"]),
        # combined schemas
        ({"allOf": [INTEGER, {"minimum": 3}]}, [3], [2, "x"]),
        ({"allOf": [AB, {"properties": {"c": STRING}, "required": ["c"]}]}, [{"a": 1, "c": "x"}], [{"a": 1}, {"c": 1}]),
        ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 3}, [3], [2, "a"]),
        ({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 0}]}, [10, 0], [5, "a"]),
        ({"enum": [1, "a", None, 5], "type": ["integer", "null"], "maximum": 4}, [1, None], ["a", 5]),
        (
            {"enum": ["a", "bb"], "not": {"const": "a"}, "if": {"minLength": 2}, "then": {"pattern": "^b"}},
            ["bb"],
            ["a"],
        ),
        # alternatives
        ({"oneOf": [INTEGER, STRING]}, [1, "a"], [None]),
        ({"oneOf": [{"pattern": "a"}, {"type": ["string", "null"], "pattern": "b"}]}, ["a", "b", 1], ["ab", "c", None]),
        (
            {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3, "maxLength": 5}]},
            ["ab", "abcd"],
            ["abc", "abcdef"],
        ),
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "x"}], [{"kind": "fox"}]),
        ({**AB, "oneOf": [A, B]}, [{"a": 1}, {"b": True}], [{}, {"a": 1, "b": True}]),
        ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, [1, 6], [3]),
        ({**AB, "anyOf": [A, B]}, [{"a": 1}, {"b": True}, {"a": 1, "b": True}], [{}]),
        ({**AB, "not": A}, [{}, {"b": True}], [{"a": 1}]),
        (
            {**AB, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": B},
            [{"a": 2}, {"a": 1, "b": True}],
            [{"a": 1}],
        ),
        (
            {**AB, "if": A, "then": B, "else": {"properties": {"b": False}}},
            [{}, {"a": 1, "b": True}],
            [{"a": 1}, {"b": True}],
        ),
        # references
        ({"$defs": {"x": {"$anchor": "y", "type": "integer"}}, "$ref": "#y"}, [1], ["a"]),
        ({"$defs": {"x": {"$dynamicAnchor": "y", "type": "integer"}}, "$ref": "#y"}, [1], ["a"]),
        ({"$defs": {"x": {"$dynamicAnchor": "y", "type": "integer"}}, "$dynamicRef": "#y"}, [1], ["a"]),
        ({"$defs": {"a/b%c~d": INTEGER}, "$ref": "#/$defs/a~1b%25c~0d"}, [1], ["a"]),
        (
            {"$id": "http://x/s.json", "$defs": {"x": {"$id": "t.json", "type": "integer"}}, "$ref": "t.json"},
            [1],
            ["a"],
        ),
        (
            {
                "$defs": {"p/q~": {"$id": "http://x/t.json", "$defs": {"i": INTEGER}, "$ref": "#/$defs/i"}},
                "$ref": "#/$defs/p~1q~0",
            },
            [1],
            ["a"],
        ),
        ({"properties": {"p/q~": {"$id": "http://x/t.json", "type": "integer"}}}, [{"p/q~": 1}], [{"p/q~": "a"}]),
        (  # a place that is no schema of its own, in a resource with other definitions
            {
                "$defs": {
                    "i": {"type": "string"},
                    "t": {"$id": "http://x/t.json", "$defs": {"i": INTEGER}, "other": [{"$ref": "#/$defs/i"}]},
                },
                "$ref": "#/$defs/t/other/0",
            },
            [1],
            ["a"],
        ),
        (
            {"properties": {"next": {"$ref": "#"}, "v": INTEGER}, "type": "object"},
            [{"next": {"next": {"v": 1}}}],
            [{"next": 1}],
        ),
        # the second of two
        ({"type": ["null", "integer"], "not": {"const": None}}, [1], [None]),
        ({"type": ["boolean", "null"], "not": {"enum": [True, 1]}}, [False, None], [True]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 4}, [5], [3, 4]),
        ({"type": "integer", "maximum": 4, "exclusiveMaximum": 3}, [2], [3, 4]),
        # dialects
        ({**DRAFT4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        (
            {**DRAFT4, "id": "http://x/y", "definitions": {"i": {"id": "#i", "type": "integer"}}, "$ref": "#i"},
            [1],
            ["a"],
        ),
        ({**DRAFT7, "type": "array", "items": [INTEGER], "additionalItems": STRING}, [[1, "a"]], [["a"], [1, 1]]),
        ({**DRAFT7, "definitions": {"x": INTEGER}, "$ref": "#/definitions/x", "minimum": 3}, [1], ["a"]),
        ({**DRAFT7, **AB, "dependencies": {"a": ["b"]}}, [{"b": True}], [{"a": 1}]),
    ],
)
def test_keywords_accept_and_reject_the_same_values_as_jsonschema(schema, good, bad):
    check_texts(schema, good, bad)


def test_undeclared_names_are_rejected_in_objects_with_declared_names():
    """Stricter than JSON Schema; docs/structured.md says so."""
    assert not accepts(grammar_of(AB), '{"c": 1}')
    assert accepts(grammar_of({**AB, "additionalProperties": True}), '{"c": 1}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (AB, [{"a": 1, "c": [1]}, {"ab": None}], [{"a": "x"}, {"c": 1, "a": "x"}]),
        ({**AB, "additionalProperties": False}, [{"a": 1}], [{"c": 1}]),
        ({**AB, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
        ({"patternProperties": {"^x": INTEGER}}, [{"x1": 1, "y": "s"}, {"": 1}], [{"x": "s"}]),
        ({"allOf": [AB, {"properties": {"c": STRING}}]}, [{"a": 1, "c": "s", "d": 1}], [{"a": 1, "c": 1}]),
        ({**AB, "not": {"required": ["c"]}}, [{"a": 1, "d": 1}], [{"c": 1}]),
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "name": 5}], [{"kind": "fox"}, {"kind": "dog", "name": 5}]),
    ],
)
def test_undeclared_names_are_accepted_on_request(schema, good, bad):
    """As JSON Schema defines it."""
    check_texts(schema, good, bad, closed=False)


def test_the_default_dialect_is_the_newest_in_which_the_schema_is_valid():
    pairs = {"type": "array", "items": [INTEGER, STRING]}
    assert accepts(grammar_of(pairs), '[1, "a"]')
    assert not accepts(grammar_of(pairs), '["a"]')
    with pytest.raises(BadRequest, match="is not of type 'object', 'boolean'"):
        grammar_of(pairs | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
    assert not accepts(grammar_of({"type": "integer", "minimum": 3, "exclusiveMinimum": True}), "3")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "format": "uri-template"}, "#/format: 'uri-template' is not supported"),
        ({"type": "integer", "multipleOf": 10_001}, "#/multipleOf: the least common .* at most 10000 .*got 10001"),
        ({"allOf": [{"multipleOf": 2.0**e * 3**40} for e in range(0, 800, 40)]}, "least common multiple must be"),
        ({"allOf": [{"multipleOf": 103}, {"multipleOf": 97.1}]}, "#/allOf/0/multipleOf: .* got 103, 97.1; use a"),
        ({"type": "string", "pattern": "^a(?=b)c$"}, "#/pattern: a pattern that no text matches is not supported"),
        ({"type": "string", "pattern": r"^(a)\1$"}, r"#/pattern: the escape \\1 is not supported"),
        ({"enum": ["1"], "pattern": r"^\p{Greek}$"}, "#: its values cannot be checked"),
        ({"type": "array", "contains": INTEGER}, "#/contains: a required item"),
        (
            {"oneOf": [INTEGER, {"type": "number"}]},
            "#/oneOf/1/not: excluding integers|#/not: excluding integers",
        ),
        ({"oneOf": [STRING, {"format": "date"}]}, r"#/oneOf: branches \d and \d may both hold"),
        ({"type": "string", "not": {"format": "date"}}, "#/not/format: its negation is not supported"),
        ({"type": "array", "not": {"const": [1]}}, "#/not: a list or an object is not supported as an excluded value"),
        ({"type": "object", "not": {"enum": [1, {}]}}, "#/not: a list or an object is not supported as an excluded"),
        (
            {"type": "string", "not": {"pattern": "^(a|b)*a(a|b){12}$"}},
            "#/not/pattern: a complement, lookahead or lookbehind of many cases",
        ),
        (
            {"type": "string", "not": {"pattern": "(a{50}){50}"}},
            "#/not/pattern: a complement, lookahead or lookbehind of many cases",
        ),
        (
            {"allOf": [{**AB, "unevaluatedProperties": False}, {"properties": {"c": {}}}]},
            "#/allOf/0/unevaluatedProperties",
        ),
        (
            {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
            "#/minProperties: is only supported if no other names are allowed, because repeated names",
        ),
        (
            {"type": "object", "patternProperties": {"(a{50}){50}": INTEGER}, "additionalProperties": {}},
            "#/patternProperties: a complement, lookahead or lookbehind of many cases",
        ),
        ({"$ref": "http://example.com/x"}, "#/\\$ref: 'http://example.com/x' is not in this schema"),
        ({"$ref": "#/$defs/none"}, "is not a place in this schema"),
        ({"$ref": "#"}, "only refers to itself"),
        ({"allOf": [{"$ref": "#"}]}, "only refers to itself"),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, "only refers to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "only refers to itself",
        ),
        ({"$dynamicRef": "#x"}, "is not one place in this schema"),
        ({"const": 2**53 + 1}, "#/const: 9007199254740993 contains a number"),
        ({"enum": [-(2.0**53) - 2]}, "contains a number"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#: no finite text fits"),
        ({"allOf": [INTEGER, STRING]}, "#: no finite text fits"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"format": "date"}}}}},
            "#/properties/a/items/not",
        ),
        (
            {"properties": {"a": {"properties": {"b/c": {"contains": INTEGER}}}}},
            "#/properties/a/properties/b~1c/contains",
        ),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft-03 is not supported"),
    ],
)
def test_unsupported_keywords_are_rejected_with_name_and_path(schema, place):
    with pytest.raises(BadRequest, match=place):
        enforceable(schema)


def test_an_error_lists_at_most_twenty_paths():
    schema = {"properties": {f"p{n}": {"type": "array", "contains": INTEGER} for n in range(30)}}
    with pytest.raises(BadRequest) as refused:
        enforceable(schema)
    lines = str(refused.value).split("\n")
    assert "- #/properties/p0/contains" in lines[1]
    assert lines[21] == "- and 10 more"
    assert "validate_output=True" in lines[22]


def test_long_names_with_other_names_are_exact():
    name = "n" * 200
    schema = {"properties": {name: INTEGER, name[:150] + "x": STRING}, "additionalProperties": {"const": 0}}
    grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
    keys = name, name[:150] + "x", name[:-1], name + "n", name[:150], "x" + name[1:], name[:99] + "x" + name[100:]
    for key in keys:
        for value in (0, 1, "x"):
            assert accepts(grammar, json.dumps({key: value})) == validator.is_valid({key: value})
    assert not accepts(grammar, f'{{"{name}": 1, "{name}": 2}}')


@pytest.mark.parametrize("least", [0, 6])
@pytest.mark.parametrize("most", [60, 254, 320, 2000])
@pytest.mark.parametrize("name", ["email", "idn-email", "uri", "hostname", "uuid4"])
def test_a_format_may_have_a_length(name, least, most):
    grammar = grammar_of({"type": "string", "format": name, "minLength": least, "maxLength": most})
    text = {"uri": "http://a.de", "hostname": "ab.cd.ef", "uuid4": "550e8400-e29b-41d4-a716-446655440000"}
    assert accepts(grammar, f'"{text.get(name, "a.b@c.de")}"')
    assert not accepts(grammar, f'"{"a" * (most - 4)}@b.cd"')


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "array", "items": INTEGER, "contains": {"const": 1}}, "[2]", '["a"]'),
        ({"oneOf": [INTEGER, {"type": "number", "minimum": 3}]}, "4", '"a"'),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^x(?!y)y$"}}}, '{"a": "x"}', '{"a": 1}'),
    ],
)
def test_a_relaxed_schema_still_enforces_its_supported_part(schema, taken, refused):
    grammar = compiler().compile("json", json.dumps(relaxed(schema)), whitespace="compact")
    assert accepts(grammar, taken)
    assert not accepts(grammar, refused)


def test_many_overlapping_branches_are_rejected_before_they_are_combined() -> None:
    with pytest.raises(BadRequest, match="too many combinations of schemas"):
        enforceable({"oneOf": [{"type": "string", "pattern": f"^a{{{count}}}b"} for count in range(500)]})


@pytest.mark.parametrize("use", ["propertyNames", "items"])
def test_choices_of_definitions_are_followed_once(use: str) -> None:
    """Each of 16 definitions names the next one three times, which are 43 million ways to the last."""
    definitions: dict[str, object] = {
        f"a{i}": {
            "anyOf": [
                {"$ref": f"#/$defs/a{i + 1}"},
                {"type": "integer", "minimum": i},
                *2 * [{"$ref": f"#/$defs/a{i + 1}"}],
            ]
        }
        for i in range(16)
    }
    definitions["a16"] = {"type": "string"}
    kind = {"type": "object"} if use == "propertyNames" else {"type": "array", "uniqueItems": True}
    enforceable({"$defs": definitions, **kind, use: {"$ref": "#/$defs/a0"}})


def test_a_pattern_is_not_matched_against_a_long_literal() -> None:
    """The match could take exponential time and hold the interpreter lock."""
    stuck = {"enum": ["a" * 40 + "!"], "not": {"pattern": "^(a+)+$"}}
    with pytest.raises(BadRequest, match="a pattern is not tried on a given text of more than 16 characters"):
        enforceable(stuck)
    assert relaxed(stuck)
    name = {"enum": [{"a" * 16: 1}], "patternProperties": {"^a+$": {"type": "integer"}}}
    assert enforceable(name)
    with pytest.raises(BadRequest, match="a pattern is not tried"):
        enforceable(name | {"enum": [{"a" * 17: 1}]})
    assert enforceable({"enum": ["abc", "bcd"], "pattern": "^a"})


EDGES = [10**17, 10**18, 2**62, 2**63, 2**64, 10**30]


@settings(deadline=None)
@given(
    kind=st.sampled_from(["integer", "number"]),
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.builds(
            lambda sign, edge, offset: sign * (edge + offset),
            st.sampled_from([-1, 1]),
            st.sampled_from(EDGES),
            st.sampled_from([-1025, -1024, -1023, -1, 0, 1, 1024]),
        ),
        min_size=1,
    ),
)
def test_a_bound_of_many_digits_is_enforced_or_rejected_by_name(kind, bounds):
    """No message is the engine's own. A number may be valid as it is or as the nearest double."""
    schema = {"type": kind, **bounds}
    validator = jsonschema.Draft202012Validator(schema)
    try:
        compiled = grammar_of(schema)
    except BadRequest as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "imum: must be" in message or "no finite text fits the schema" in message, message
        return
    values = [bound + step for bound in bounds.values() for step in (-2048, -1, 0, 1, 2048)]
    for value in [*values, 0, 10**17, -(10**17)]:
        if accepts(compiled, str(value)):
            assert validator.is_valid(value) or (kind == "number" and validator.is_valid(float(value))), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 10**18}, "#/minimum: must be from -9223372036854775807 to 999999999999998976"),
        ({"type": "integer", "minimum": 2**63}, "#/minimum: must be from .* received 9223372036854775808; use another"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**64}, "#/minimum: must be from .* to 9223372036854773760"),
        ({"type": "number", "exclusiveMaximum": -(10**18)}, "#/exclusiveMaximum: must be from -999999999999998976 to"),
    ],
)
def test_a_bound_that_the_engine_cannot_hold_is_rejected_by_name(schema, message):
    with pytest.raises(BadRequest, match=message):
        grammar_of(schema)


def test_the_largest_bounds_are_enforced():
    assert accepts(grammar_of({"type": "integer", "minimum": 10**18 - 1024}), str(10**18 - 1024))
    assert not accepts(grammar_of({"type": "integer", "minimum": 10**18 - 1024}), str(10**18 - 1025))
    both = grammar_of({"type": "integer", "minimum": -(2**62), "maximum": 2**64 - 1})
    assert accepts(both, str(2**62))
    assert accepts(both, str(-(2**61)))


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        (
            {"additonalProperties": False},
            "#/additonalProperties: is not a keyword and was ignored; did you mean 'addit",
        ),
        ({"items": {"maxlength": 3}}, "#/items/maxlength: is not a keyword and was ignored; did you mean 'maxLength'?"),
        ({"format": "datetime"}, "#/format: 'datetime' is not a format and was ignored; did you mean 'date-time'?"),
    ],
)
def test_a_misspelled_keyword_constrains_nothing_and_gives_a_warning(schema, warning, caplog):
    [message] = spelling_warnings(StructuredOutputs(json=schema))
    assert message.startswith(f"structured_outputs.json: {warning}")
    assert spelling_warnings(StructuredOutputs(json=json.dumps(schema))) == [message]
    assert spelling_warnings(StructuredOutputs(json={"properties": {"maxlength": {}, "x-y": {"title": "z"}}})) == []
    read(StructuredOutputs(json=schema))
    assert caplog.messages == [message]
    assert accepts(grammar_of(schema), '{"a": ["bcde"]}')


DROPPED = {
    "not": {"required": ["a"]},
    "if": {"required": ["b"]},
    "then": {"required": ["b"]},
    "else": {"required": ["b"]},
    "dependentRequired": {"b": ["a"]},
    "dependentSchemas": {"b": {"required": ["a"]}},
    "contains": {"type": "integer"},
    "uniqueItems": True,
    "propertyNames": {"maxLength": 2},
    "minProperties": 2,
    "maxProperties": 1,
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
}


@pytest.mark.parametrize("keyword", DROPPED)
def test_a_relaxed_schema_has_none_of_the_keywords_that_only_the_finished_text_is_checked_against(keyword):
    unsupported = {"contains": {"type": "integer"}}
    for schema in (
        {"type": "object", "patternProperties": {"^a": {}}, "properties": {"b": unsupported}},
        {"type": "array", "items": unsupported},
    ):
        assert relaxed({**schema, keyword: DROPPED[keyword]}) == relaxed(schema)


@pytest.mark.parametrize("keyword", ["x-pattern", "$items", "_required", "@type"])
def test_a_keyword_of_an_extension_is_no_misspelling(keyword):
    assert spelling_warnings(StructuredOutputs(json={keyword: "type"})) == []


def test_one_of_counts_the_branches_that_hold_for_names_that_are_not_written():
    schema = {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}},
        "propertyNames": {"enum": ["a", "b"]},
        "minProperties": 2,
        "oneOf": [{"required": ["a", "b"]}, {"maxProperties": 2}],
    }
    assert not jsonschema.Draft202012Validator(schema).is_valid({"a": 1, "b": 1})
    with pytest.raises(BadRequest, match="no finite text fits"):
        grammar_of(schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["null", "integer"], "not": {"const": None}}, "1", "null"),
        ({"type": ["boolean", "integer"], "not": {"const": True}}, "false", "true"),
        ({"not": {"enum": [None, 1, "a", True]}}, "2", "null"),
    ],
)
def test_an_excluded_value_is_never_written(schema, good, bad):
    grammar = grammar_of(schema)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_bounds_close_together_are_rejected_by_the_narrower_of_each_end():
    low, high = 2**54, 2**55
    for near in ({"exclusiveMinimum": high - 4}, {"exclusiveMaximum": low + 4}):
        with pytest.raises(BadRequest, match="below the maximum"):
            grammar_of({"type": "integer", "minimum": low, "maximum": high, **near})
    assert accepts(grammar_of({"type": "integer", "minimum": low, "maximum": high}), str(low + 2**52))
