"""Other spellings of JSON values: escapes in strings and names, and numbers with exponents."""

import json
import random
import re
from decimal import Decimal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.runtime.grammars import sources
from tests.plain.drawing import accepts, grammar_of, write

ALL = [
    {"type": "string"},
    {"type": "string", "pattern": r"^[\s\S]*$"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "[^x]$", "minLength": 3},
]
ASCII = r"^[\x00-\x7f]*$"  # plain characters of a text that must be ASCII are not escaped
LETTERS = 'aA"\\/\n\x00\x1f\x7fé<日😀\ud7ff\ue000\U0010ffff'


def spellings(letter):
    """Return every spelling of a character in a JSON string."""
    short = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    units = letter.encode("utf-16-be").hex()
    escape = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    return [
        *([letter] if letter not in '"\\' and letter >= " " else []),
        *([short[letter]] if letter in short else []),
        escape,
        escape[:2] + escape[2:].upper().replace("\\U", "\\u"),
    ]


@pytest.mark.parametrize("schema", ALL, ids=str)
@pytest.mark.parametrize("letter", LETTERS, ids=ascii)
def test_a_string_takes_every_spelling_of_a_character(schema, letter):
    for spelling in spellings(letter):
        text = f'"a{spelling}b"'
        assert json.loads(text) == f"a{letter}b"
        assert accepts(grammar_of(schema), text)


@pytest.mark.parametrize("schema", ALL, ids=str)
@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ud83d\\u0041", "\\x41", "\\u12", "\\'", "\x1f"])
def test_a_string_takes_no_half_of_a_pair_and_no_other_escape(schema, escape):
    assert not accepts(grammar_of(schema), f'"a{escape}b"')


@pytest.mark.parametrize(
    "pattern", ["^[^b]*$", "^[a-cé-ú😀-😿]*$", '^(?:[^"/]|/x)*$', "^.{0,2}$", r"^\S*$", r"^(?!A).*$", ASCII]
)
@given(letters=st.lists(st.sampled_from([each for letter in "bcA/é😀 x\n" for each in spellings(letter)]), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_string_with_escapes_is_accepted_if_its_value_is(pattern, letters):
    text = f'"{"".join(letters)}"'
    valid = re.search(pattern.replace("$", r"\Z"), json.loads(text), re.ASCII) is not None
    if pattern == ASCII:
        valid = valid and not re.search(r"\\u00(?:6[23]|41|78|20)", text)
    assert accepts(grammar_of({"type": "string", "pattern": pattern}), text) == valid


@pytest.mark.parametrize("schema", [{"enum": ["a/b", "é\n", "<😀>"]}, {"const": "a/b"}], ids=str)
def test_a_listed_text_may_be_written_as_serializers_do(schema):
    grammar = grammar_of(schema)
    for value in schema.get("enum", [schema.get("const")]):
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value).replace("/", "\\/")):
            assert accepts(grammar, text)
            assert accepts(grammar, text.replace("<", "\\u003c").replace(">", "\\u003E"))
    assert not accepts(grammar, '"\\u00c9\\n"')
    assert not accepts(grammar, '"a\\u002eb"')


def test_letters_and_digits_of_a_listed_text_are_never_escaped_so_that_they_are_forced():
    grammar = grammar_of({"enum": ["pending", "done"]})
    assert not accepts(grammar, '"\\u0070ending"')
    matcher = grammar.matcher()
    for byte in b'"p':
        assert matcher.accept(byte)
    assert bytes(matcher.fast_forward_tokens()) == b'ending"'


@pytest.mark.parametrize("closed", [True, False])
def test_a_name_may_be_escaped_and_is_the_same_name(closed):
    schema = {
        "type": "object",
        "properties": {"é": {"type": "integer"}, "a/b": {"type": "integer"}, 'q"\n': {"type": "integer"}},
        "patternProperties": {"^x": {"type": "boolean"}},
        "additionalProperties": False if closed else {"type": "null"},
    }
    grammar = grammar_of(schema)
    for name in ("é", "\\u00e9", "\\u00E9", "a/b", "a\\/b", "a\\u002fb", 'q\\"\\n', "q\\u0022\\u000a"):
        assert accepts(grammar, f'{{"{name}": 1}}')
        assert not accepts(grammar, f'{{"{name}": null}}')
    assert accepts(grammar, '{"x\\u00e9": true}')
    assert accepts(grammar, '{"y\\u00e9": null}') is not closed
    for name in ("x", "\\u0078"):
        assert not accepts(grammar, f'{{"{name}": null}}')


@pytest.mark.parametrize(
    ("bounds", "taken", "refused"),
    [
        (
            {"minimum": 0, "maximum": 200},
            "1e2 1E+2 2e2 2.0e02 -0.0 -0 0e5 1.5e-05 200.000 9E1",
            "2.1e2 1e3 -1e-9 -1 2e3",
        ),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "1e-3 4.9e-1 0.499", "5e-1 0.5 0 -0.0 0e0 1e0"),
        ({"minimum": -12.25}, "-1.225e1 -12.25 -9 1e300 -0.0 0", "-1.226e1 -1.3e1 -2e1 -1e2 -12.251"),
        ({"maximum": -1e-7}, "-1e-7 -0.0000001 -1e2 -1.01e-07", "-9e-8 0 -0.0 1"),
    ],
)
def test_a_number_between_bounds_may_have_an_exponent(bounds, taken, refused):
    grammar = grammar_of({"type": "number", **bounds})
    assert [text for text in taken.split() if not accepts(grammar, text)] == []
    assert [text for text in refused.split() if accepts(grammar, text)] == []


numbers = st.one_of(
    st.integers(-1000, 1000).map(str),
    st.decimals(-300, 300, places=3, allow_nan=False).map(lambda number: f"{number:f}"),
    st.builds(
        lambda sign, digits, e, exponent: f"{sign}{digits}{e}{exponent}",
        st.sampled_from(["", "-"]),
        st.sampled_from(["1", "9", "2.5", "1.01", "9.99", "5.0"]),
        st.sampled_from("eE"),
        st.sampled_from(["0", "1", "+2", "-1", "-02", "3", "10", "-300", "300"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    low=st.none() | st.integers(-20, 20) | st.sampled_from([-99.5, -0.05, 0.5, 3.125, 1e-7]),
    size=st.none() | st.integers(1, 400) | st.sampled_from([0.25, 0.01]),
    exclusive=st.tuples(st.booleans(), st.booleans()),
    kind=st.sampled_from(["integer", "number"]),
    texts=st.lists(numbers, min_size=20, max_size=40),
)
def test_a_number_is_accepted_if_it_is_between_the_bounds(low, size, exclusive, kind, texts):
    schema = {"type": kind}
    if low is not None:
        schema["exclusiveMinimum" if exclusive[0] else "minimum"] = low
    if size is not None:
        schema["exclusiveMaximum" if exclusive[1] else "maximum"] = (low or 0) + size
    if kind == "integer" and ((low or 0) % 1 or (size or 2) < 2):
        return  # possibly no integer
    as_written = json.loads(json.dumps(schema), parse_float=Decimal)  # the double 0.01 is a little more than 0.01
    grammar, check = grammar_of(schema), jsonschema.Draft202012Validator(as_written)
    for text in texts:
        whole = re.fullmatch(r"-?\d+", text) is not None
        valid = check.is_valid(json.loads(text, parse_float=Decimal)) and (kind == "number" or whole)
        near_zero = Decimal(text) != 0 and abs(Decimal(text)) < Decimal("1e-15")  # not written next to some bounds
        assert accepts(grammar, text) == valid or near_zero, (schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[^a]*$"},
        {"type": "string", "pattern": r"^[\x00-\x1f]{2}$"},
        {"type": "string", "pattern": r"^\P{L}\p{Lu}$"},
        {"type": "string", "pattern": '^[^"]\\x00?$', "maxLength": 5},
        {"type": "string", "format": "json-pointer"},
        {"enum": ["/\n", "é\x7f", 1.0, None]},
        {"type": "object", "properties": {"é": {"const": "/"}}, "additionalProperties": {"type": "integer"}},
        {"type": "array", "items": {"type": "number", "minimum": -3, "exclusiveMaximum": 0.5}},
    ],
    ids=str,
)
def test_every_text_with_escapes_is_valid_and_passes_the_check_of_the_output(schema):
    """The random text prefers backslashes, and the hexadecimal digits after them."""
    chance, grammar = random.Random(0), grammar_of(schema)
    _, check = sources.read(StructuredOutputs(json=schema, validate_output=True))
    texts = [text for _ in range(150) if (text := write(grammar, chance, prefer=b"\\u0eE")) is not None]
    assert len(texts) > 40
    assert [text for text in texts if check(text.decode()) is not None] == []
