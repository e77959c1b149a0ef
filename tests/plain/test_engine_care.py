"""Workarounds for grammar engines are still needed. Each test runs an engine without the workaround.

A test that fails shows that its workaround, and the test itself, can go.
"""

import json

import numpy as np
import pytest

from tandemrt.engines.text.formats import PATTERNS
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.grammars.schema.lowering import MAX_OPTIONAL
from tests.plain.constraints import STOP, THINK, WORDS, byte_tokens, compiled, compiler, tokens_in
from tests.plain.drawing import accepts, grammar_of

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
KNOWN = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}  # to llguidance
UNKNOWN = PATTERNS.keys() - KNOWN


def alone(schema):
    """Return llguidance's grammar of the unmodified schema."""
    return compiler().compile("json", json.dumps(schema), whitespace="compact")


def pattern(expression):
    return {"type": "string", "pattern": expression}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # U+0000 is left out of character sets that exclude the quote or the backslash
        (pattern('^[^"]*$'), '"\\""'),
        (pattern(r"^[^\\]+$"), r'"a\\"'),
        # shorthands are written as the sets of ECMA-262
        (pattern("^.$"), '"\u2028"'),
        (pattern(r"^\s$"), '"\x85"'),
        (pattern(r"^\S$"), '"\ufeff"'),
        # other names need their own pattern
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, '{"\\u0061": "x"}'),
        ({"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": STRING}, '{"\\u0078": "s"}'),
        # bounds and literals are float64
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        ({"const": 2**53 + 1}, str(2**53)),
        # repeated names would count twice
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, '{"a": 1, "a": 2}'),
        # control characters in names next to patterns
        (
            {
                "type": "object",
                "properties": {"\n": INTEGER},
                "patternProperties": {"^[^a]$": STRING},
                "additionalProperties": False,
            },
            '{"\\u000a": "s"}',
        ),
        # formats use our patterns
        ({"type": "string", "format": "date"}, '"2021-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2021-02-28T00:00:60Z"'),
        ({"type": "string", "format": "time"}, '"00:00:60Z"'),
        ({"type": "string", "format": "email"}, '"a{b@c"'),
        ({"type": "string", "format": "hostname"}, f'"{"a." * 127}a"'),
        ({"type": "string", "format": "uri"}, '"http://a:99999999"'),
    ],
)
def test_llguidance_alone_accepts_texts_that_violate_a_schema(schema, text):
    assert accepts(alone(schema), text)
    try:
        ours = enforceable(schema)
    except BadRequest:
        return  # for the same reason
    assert not accepts(alone(ours), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": STRING},
        {"if": STRING, "then": {"minLength": 3}},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        {"type": "object", "properties": {"a": INTEGER}, "dependentSchemas": {"a": {"minProperties": 1}}},
        {"type": "object", "propertyNames": {"maxLength": 1}},
        {"oneOf": [INTEGER, {"type": "string", "pattern": "^a*$"}, {"type": "string", "pattern": "^b+$"}]},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        {"type": "object", "patternProperties": {"^.$": INTEGER, "^a$": {"minimum": 1}}},
        *({"type": "string", "format": name} for name in sorted(UNKNOWN)),
    ],
    ids=lambda schema: " ".join(schema) + schema.get("format", ""),
)
def test_llguidance_alone_does_not_support_keywords_that_we_rewrite(schema):
    with pytest.raises(BadRequest, match="cannot be compiled"):
        alone(schema)
    assert enforceable(schema)


def test_ipv6_addresses_that_end_in_an_ipv4_address_are_supported_only_by_our_pattern():
    schema, text = {"type": "string", "format": "ipv6"}, '"::ffff:1.2.3.4"'
    assert accepts(grammar_of(schema), text)
    assert not accepts(alone(schema), text)


def test_llguidance_loses_a_declared_name_with_a_quote_next_to_a_pattern():
    """Our schema reader therefore rejects this combination."""
    schema = {"type": "object", "properties": {'"': INTEGER}, "patternProperties": {"^.$": STRING}}
    assert not accepts(alone({**schema, "additionalProperties": False}), '{"\\"": 1}')
    for name in ('"', "\\", "\x00", "\x1f", "\x7f"):
        with pytest.raises(BadRequest, match="a property with a quote, backslash or control character"):
            enforceable({**schema, "properties": {f"a{name}": INTEGER}})
    for name in " ~\x80'":
        assert enforceable({**schema, "properties": {f"a{name}": INTEGER}})


def test_many_optional_properties_make_llguidance_end_a_text_early():
    def optional(count):
        return {"type": "object", "properties": {f"p{n}": INTEGER for n in range(count)}}

    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        accepts(alone({**optional(600), "additionalProperties": False}), '{"p1": 1, "p2": 2}')
    assert accepts(grammar_of(optional(MAX_OPTIONAL)), '{"p1": 1, "p2": 2}')
    with pytest.raises(BadRequest, match="more than 400 properties are not supported if they are optional"):
        enforceable(optional(MAX_OPTIONAL + 1))


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}], ids=str)
def test_a_reference_to_itself_leaves_llguidance_without_a_text(schema):
    with pytest.raises(BadRequest, match="NoExtension"):
        alone(schema).matcher().fill_row(np.zeros(WORDS, np.int32))
    with pytest.raises(BadRequest, match="only refers to itself"):
        enforceable(schema)


def test_llguidance_begins_a_text_that_cannot_end():
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    assert all(map(alone(endless).matcher().accept, byte_tokens('{"a": ' * 50)))
    with pytest.raises(BadRequest, match="no finite text fits"):
        enforceable(endless)


# xgrammar.


def test_xgrammar_alone_accepts_bytes_that_are_no_utf8():
    grammar = compiled("grammar", "root ::= [^x]+").matcher()
    assert grammar._matcher.accept_token(0xED)
    assert grammar._matcher.accept_token(0xA0)


def test_xgrammar_alone_prints_warnings_for_tokens_without_text(capfd):
    assert not compiled("grammar", "root ::= [^x]+").matcher()._matcher.accept_token(THINK)
    assert capfd.readouterr().err != ""


def test_xgrammar_alone_leaves_the_stop_tokens_of_its_compiler_in_a_row():
    grammar, row = compiled("grammar", "root ::= [^x]+").matcher([ord("x")]), np.zeros(WORDS, np.int32)
    grammar._matcher.fill_next_token_bitmask(row)
    assert STOP in tokens_in(row)
