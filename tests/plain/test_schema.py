"""A schema is either refused by keyword and place, or every text of its grammar validates against it (jsonschema)."""

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.grammars.patterns import FORMATS, unenforceable
from tandemrt.runtime.grammars.schema import check_enforceable, check_valid, lowered
from tests.plain.constraints import STOP, WORDS, compiled, compiler, spell, tokens_in

INTEGER, BOOLEAN, STRING = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INTEGER, "b": BOOLEAN}}


def write(grammar, chance: random.Random, limit: int = 250) -> bytes | None:
    """A text drawn from the rows of a grammar, quick to close what is open; None if it grew too long."""
    matcher, row, text = grammar.matcher(), np.empty(WORDS, np.int32), []
    while len(text) < limit:
        matcher.fill(row)
        legal = sorted(token for token in tokens_in(row) if token < 256 or token == STOP)
        assert legal, "a grammar must not run dry"
        if STOP in legal and (legal == [STOP] or chance.random() < 0.5):
            return bytes(text)
        legal = [token for token in legal if token != STOP]
        closing = [token for token in legal if token in b'"}]']
        readable = [token for token in legal if 0x20 <= token < 0x7F and token != 0x5C]
        luck = chance.random()
        token = chance.choice(closing if closing and luck < 0.3 else readable if readable and luck < 0.95 else legal)
        assert matcher.accept(token)
        text.append(token)
    return None


def takes(grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, spell(text))) and matcher.accept(STOP)


def grammar_of(schema, any_whitespace=False):
    return compiler().compile("json", json.dumps(lowered(schema)), any_whitespace=any_whitespace)


# Schemas that are let through.

keys = st.sampled_from(["a", "b", "format", 'q"\\', "é"])
bounds = st.integers(-30, 300)


def ordered(low, high):
    return lambda kw: low not in kw or high not in kw or kw[low] <= kw[high]


def numbers(values):
    fields = {"minimum": values, "maximum": values}
    return st.fixed_dictionaries({}, optional=fields).filter(ordered("minimum", "maximum"))


lengths = st.fixed_dictionaries({}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(0, 6)}).filter(
    ordered("minLength", "maxLength")
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
    st.sampled_from(sorted(FORMATS)).map(lambda name: {"type": "string", "format": name}),
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
    unions = st.lists(children, min_size=1, max_size=3).map(lambda found: {"anyOf": found, "title": "one of them"})
    alone = children.map(lambda child: {"allOf": [child]})
    either = st.just({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}]})
    return arrays | pairs | objects | maps | unions | alone | either


schemas = st.recursive(leaves, branches, max_leaves=6).map(
    lambda schema: {"$defs": {"shared": {"type": "integer", "minimum": 0}}, "allOf": [schema]}
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_every_text_of_an_enforceable_schema_validates(schema, seed):
    check_valid(schema)
    check_enforceable(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date", "ipv4"]))
    chance = random.Random(seed)
    grammar = grammar_of(schema)
    for _ in range(4):
        text = write(grammar, chance)
        if text is not None:
            validator.validate(json.loads(text))


def neighbours(value):
    """Values that are one small change away from ``value``, at its top or anywhere inside."""
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
    """``text`` with one character more, less or another one."""
    at, letter = chance.randrange(len(text)), chance.choice('0123456789-+.eE"\\{}[],: atnx\n')
    return text[:at] + chance.choice(["", letter, letter + text[at], text[at] * 2]) + text[at + 1 :]


def judged(schema, chance: random.Random):
    """Texts near those that the grammar writes; for each, whether jsonschema says it is valid and the grammar takes it.

    Also two texts that the grammar wrote itself, if it found an end.
    """
    validator, grammar = jsonschema.Draft202012Validator(schema), grammar_of(schema, any_whitespace=True)

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    def valid(text):
        try:
            return validator.is_valid(json.loads(text, parse_constant=refuse))
        except ValueError:
            return False

    for written in (write(grammar, chance) for _ in range(2)):
        if written is None or (text := written.decode(errors="replace")).encode() != written:
            continue  # xgrammar also takes surrogates in the form of UTF-8, which are no text to judge
        near = [json.dumps(other, ensure_ascii=chance.random() < 0.5) for other in neighbours(json.loads(text))]
        texts = [text, *chance.sample(near, min(20, len(near))), *(misspelled(text, chance) for _ in range(12))]
        yield from ((each, valid(each), takes(grammar, each)) for each in texts)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_no_text_that_breaks_the_schema_is_taken(schema, seed):
    """Texts that are nearly valid: what the grammar writes, with one change of value or spelling."""
    assert [text for text, valid, taken in judged(schema, random.Random(seed)) if taken and not valid] == []


def test_nearly_valid_texts_fall_on_both_sides():
    """So the test above judges at the boundary: a good part of what it asks is valid and taken, the rest is neither."""
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
    found = [(valid, taken) for seed in range(20) for _, valid, taken in judged(schema, random.Random(seed))]
    assert found.count((False, True)) == 0
    assert found.count((True, True)) > len(found) / 8
    assert found.count((False, False)) > len(found) / 8


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "^a$", "maxLength": 2}, "#/maxLength: beside pattern"),
        ({"type": "string", "format": "date", "minLength": 2}, "#/minLength: beside format"),
        ({"type": "string", "format": "date", "pattern": "^a$"}, "#/format: beside pattern"),
        ({"type": "string", "pattern": "^(?=a)b$"}, r"#/pattern: the group \(\?="),
        ({"type": "string", "format": "uri"}, "#/format: 'uri' is not one of"),
        ({"type": "string", "contentEncoding": "base64"}, "#/contentEncoding: this keyword is ignored"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "#/uniqueItems: repeated"),
        ({"type": "array", "contains": INTEGER}, "#/contains: this keyword"),
        ({"type": "number", "multipleOf": 0.5}, "#/multipleOf: this keyword"),
        ({"type": "integer", "multipleOf": 1.5}, "#/multipleOf: only an integer"),
        ({"type": "number", "minimum": 1e-7}, "#/minimum: bounds"),
        ({"type": "integer", "minimum": 1.5}, "#/minimum: bounds"),
        ({"type": "integer", "not": {"const": 1}}, "#/not: this keyword"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "#/allOf: more than one"),
        ({"allOf": [INTEGER], "minimum": 3}, "#/minimum: beside allOf"),
        ({"anyOf": [INTEGER, STRING], "minimum": 3}, "#/minimum: beside anyOf"),
        ({"type": "integer", "anyOf": [INTEGER, STRING]}, "#/type: beside anyOf"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "#/oneOf: branches may overlap"),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, "#/if: this keyword"),
        ({**AB, "required": ["z"]}, "#/required: 'z' is not among"),
        ({**AB, "additionalProperties": True}, "#/additionalProperties: a declared property"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "#/minProperties: with additional"),
        ({**AB, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired: this keyword"),
        ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, "#/dependentSchemas: this keyword"),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, "#/patternProperties: this keyword"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "#/propertyNames: this keyword"),
        ({**AB, "unevaluatedProperties": False}, "#/unevaluatedProperties: this keyword"),
        ({"minimum": 5}, "#/minimum: without a type"),
        ({"required": ["a"]}, "#/required: without a type"),
        ({"type": "integer", "nullable": True}, "#/nullable: this keyword"),
        ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 3}, "#/minimum: beside \\$ref"),
        ({"$ref": "http://example.com/x"}, "#/\\$ref: 'http://example.com/x' is not a place"),
        ({"$ref": "#/$defs/none"}, "is not a place in this schema"),
        ({"$ref": "#"}, "only refers to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "only refers to itself",
        ),
        ({"$defs": {"x": {"$anchor": "y", "type": "integer"}}, "$ref": "#/$defs/x"}, r"#/\$defs/x/\$anchor: this"),
        ({"$dynamicRef": "#x"}, "#/\\$dynamicRef: this keyword"),
        ({"type": "string", "enum": ["a", 1]}, "#/enum: 1 is not of type"),
        ({"const": 12345678901234567890}, "#/const: 12345678901234567890 holds a number"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"not": INTEGER}}}},
            "#/properties/a/items/not",
        ),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_by_name_and_place(schema, place):
    """G19."""
    check_valid(schema)
    with pytest.raises(BadRequest, match=place):
        check_enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 2}, '"abc"'),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, '"x"'),
        ({"type": "integer", "not": {"const": 1}}, "1"),
        ({"type": "integer", "anyOf": [INTEGER, STRING]}, '"x"'),
        ({**AB, "required": ["z"]}, '{"a": 1}'),
        ({**AB, "additionalProperties": True}, '{"\\u0061": "x"}'),
        ({"minimum": 5}, "4"),
        ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 3}, "1"),
        ({"type": "integer", "multipleOf": 1.5}, "4"),
    ],
)
def test_the_refusals_are_needed(schema, text):
    """The grammar takes a text that breaks the schema; should xgrammar learn a keyword, this test tells."""
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert takes(compiled("json", json.dumps(schema), any_whitespace=True), text)


@pytest.mark.parametrize("schema", [5, [], "x", None])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(BadRequest, match="a schema is an object or a boolean"):
        check_valid(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": 5}, "#/type"),
        ({"properties": {"a": {"minLength": -1}}}, "#/properties/a/minLength"),
        ({"enum": 1}, "#/enum"),
    ],
)
def test_an_invalid_schema_is_refused_with_the_place(schema, place):
    with pytest.raises(BadRequest, match=f"not a JSON schema at {place}"):
        check_valid(schema)


# Patterns and formats.


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ('a"', "a quote"),
        ('["x]', "a quote"),
        (r"\x22", "a quote"),
        (r"\u000a", "a control|control character"),
        ("\n", "control character"),
        (r"\\", r"the escape \\\\"),
        (r"\n", r"the escape \\n"),
        (r"\bword", r"the escape \\b"),
        (r"(a)\1", r"the escape \\1"),
        (r"\p{L}", r"the escape \\p"),
        (r"\S", r"the escape \\S"),
        (r"[^\s]", r"\\s in a negated class"),
        ("a(?!b)", r"the group \(\?!"),
        ("(?<=a)b", r"the group \(\?<="),
        ("(?i:a)", r"the group \(\?i"),
        ("a{1,3}+", r"the repetition \{1,3\}\+"),
        ("a++", r"the repetition \+\+"),
        ("a^b", r"the anchor \^"),
        ("a$b", r"the anchor \$"),
        ("(^a)b", r"the anchor \^"),
        ("(a|ab|c)", "branches that begin with the same character"),
        ("(c|a|ab)", "branches that begin with the same character"),
        (r"x|(\d|[3-5]a)", "branches that begin with the same character"),
        ("(ab){2,}", r"the repetition \{2,\} of a group"),
    ],
)
def test_a_pattern_a_grammar_does_not_hold_exactly_is_refused(pattern, reason):
    assert re.search(reason, unenforceable(pattern) or "")


@pytest.mark.parametrize(
    "pattern",
    ["^a|b$", "", "^[ -~]+$", r'^[^"\\]{1,8}$', r"\d+\.\d{2}", r"[\d\-x]\/", "(?:a|b)*?c", "[à-é]", r"[\]a^-]"],
)
def test_a_pattern_that_is_held_writes_only_strings_that_match(pattern):
    assert unenforceable(pattern) is None
    grammar, chance = grammar_of({"type": "string", "pattern": pattern}), random.Random(0)
    texts = [text for _ in range(40) if (text := write(grammar, chance)) is not None]
    assert len(texts) > 20
    for text in texts:
        assert re.search(pattern, json.loads(text))


atoms = st.sampled_from(["a", "b", "[ab]", r"\d", "x", "a+", "b*", "x?", "[^b]"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "?", "*", "+", "{1,2}", "{2}", "{0,2}?", "{1,}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=expressions)
def test_a_pattern_matches_the_very_strings_that_python_matches(pattern):
    """Every string of up to four letters. Found what `respelled` and the refusal of like branches are for."""
    assume(unenforceable(pattern) is None)
    matcher, found = grammar_of({"type": "string", "pattern": pattern}).matcher(), set()

    def explore(text):
        if matcher.accept(34):
            if matcher.accept(STOP):
                found.add(text)
                matcher.rollback(1)
            matcher.rollback(1)
        for letter in "ab0x" if len(text) < 4 else "":
            if matcher.accept(ord(letter)):
                explore(text + letter)
                matcher.rollback(1)

    assert matcher.accept(34)
    explore("")
    strings = ("".join(letters) for length in range(5) for letters in itertools.product("ab0x", repeat=length))
    assert found == {text for text in strings if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("pattern", ["[a-c]+", r"\d{2}:\d{2}", '"[^"]*"', r"a\n\tb", "yes|no", ".{1,3}"])
def test_a_regex_of_its_own_writes_only_full_matches(pattern):
    assert unenforceable(pattern, quoted=False) is None
    chance = random.Random(0)
    for _ in range(30):
        text = write(compiled("regex", pattern), chance)
        assert text is None or re.fullmatch(pattern, text.decode())


ORACLES = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "uuid": uuid.UUID,
    "email": lambda text: re.fullmatch(r"[^@\s.]+(\.[^@\s.]+)*@[^@\s.]+(\.[^@\s.]+)+", text).group(),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_text_of_a_format_is_read_by_its_standard_reader(name):
    grammar, chance = grammar_of({"type": "string", "format": name}), random.Random(1)
    for _ in range(60):
        text = write(grammar, chance)
        assert text is None or ORACLES[name](json.loads(text)) is not None


def taken_endings(matcher, endings):
    """Which of the strings the grammar takes from here on, as the rest of a JSON string."""
    taken = set()
    for ending in endings:
        count = 0
        for token in [*spell(ending), 34, STOP]:
            if not matcher.accept(token):
                break
            count += 1
        else:
            taken.add(ending)
        matcher.rollback(count)
    return taken


def format_grammar(name, begun):
    matcher = grammar_of({"type": "string", "format": name}).matcher()
    assert all(map(matcher.accept, spell('"' + begun)))
    return matcher


@pytest.mark.parametrize("year", [1000, 1896, 1900, 1999, 2000, 2001, 2004, 2100, 2400, 2999])
def test_dates_are_those_of_the_calendar(year):
    days = {f"-{month:02}-{day:02}" for month in range(14) for day in range(33)}
    first = datetime.date(year, 1, 1)
    known = {(first + datetime.timedelta(day)).isoformat() for day in range(366)}
    assert taken_endings(format_grammar("date", str(year)), days) == {day for day in days if f"{year}{day}" in known}


def test_times_are_those_of_a_day():
    pairs = [f"{pair:02}" for pair in range(100)]
    assert taken_endings(format_grammar("time", ""), [f"{hour}:30:00Z" for hour in pairs]) == {
        f"{hour}:30:00Z" for hour in pairs[:24]
    }
    assert taken_endings(format_grammar("time", "23:"), [f"{part}:00Z" for part in pairs]) == {
        f"{part}:00Z" for part in pairs[:60]
    }
    endings = ["", "Z", ".5Z", "5Z", ".Z", ".1234567Z", "+23:59", "+24:00", "-00:60", "+1:00", "z"]
    assert taken_endings(format_grammar("time", "23:59:59"), endings) == {"Z", ".5Z", "+23:59"}


@pytest.mark.parametrize("begun", ["", "1.", "1.255.", "0.0.10."])
def test_parts_of_an_address_are_bytes_without_leading_zeros(begun):
    rest = ".1" * (3 - begun.count("."))
    parts = [str(part) + rest for part in range(1000)] + [f"0{part}{rest}" for part in range(100)]
    assert taken_endings(format_grammar("ipv4", begun), parts) == {f"{part}{rest}" for part in range(256)}
