"""Care that is taken of the engines is needed: each test asks an engine alone, and fails once it needs that no more.

Then the care can go, and the test with it.
"""

import json

import numpy as np
import pytest

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.grammars.schema.formats import PATTERNS
from tandemrt.runtime.grammars.schema.plain import MOST_OPTIONAL
from tests.plain.constraints import STOP, THINK, WORDS, compiled, compiler, spell, tokens_in
from tests.plain.drawing import grammar_of, takes

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
KNOWN = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}  # to llguidance
UNKNOWN = PATTERNS.keys() - KNOWN


def alone(schema):
    """The grammar that llguidance makes of a schema as it stands."""
    return compiler().compile("json", json.dumps(schema), any_whitespace=False)


def pattern(expression):
    return {"type": "string", "pattern": expression}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # a set of characters is written without U+0000 where it leaves out the quote or the backslash
        (pattern('^[^"]*$'), '"\\""'),
        (pattern(r"^[^\\]+$"), r'"a\\"'),
        # shorthands are written as the sets that ECMA-262 means
        (pattern("^.$"), '"\u2028"'),
        (pattern(r"^\s$"), '"\x85"'),
        (pattern(r"^\S$"), '"\ufeff"'),
        # other names are a pattern of their own
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, '{"\\u0061": "x"}'),
        ({"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": STRING}, '{"\\u0078": "s"}'),
        # bounds and literals are doubles
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        ({"const": 2**53 + 1}, str(2**53)),
        # names that repeat would count twice
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, '{"a": 1, "a": 2}'),
        # control characters in names beside patterns
        (
            {
                "type": "object",
                "properties": {"\n": INTEGER},
                "patternProperties": {"^[^a]$": STRING},
                "additionalProperties": False,
            },
            '{"\\u000a": "s"}',
        ),
        # formats have patterns of our own
        ({"type": "string", "format": "date"}, '"2021-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2021-02-28T00:00:60Z"'),
        ({"type": "string", "format": "time"}, '"00:00:60Z"'),
        ({"type": "string", "format": "email"}, '"a{b@c"'),
        ({"type": "string", "format": "hostname"}, f'"{"a." * 127}a"'),
        ({"type": "string", "format": "uri"}, '"http://a:99999999"'),
    ],
)
def test_llguidance_alone_takes_what_breaks_a_schema(schema, text):
    assert takes(alone(schema), text)
    try:
        ours = enforceable(schema)
    except BadRequest:
        return  # for the reason above
    assert not takes(alone(ours), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        {"not": STRING},
        {"if": STRING, "then": {"minLength": 3}},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        {"type": "object", "properties": {"a": INTEGER}, "dependentSchemas": {"a": {"minProperties": 1}}},
        {"type": "object", "propertyNames": {"maxLength": 1}},
        {"oneOf": [INTEGER, {"type": "string", "pattern": "^a*$"}, {"type": "string", "pattern": "^b+$"}]},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        {"type": "object", "patternProperties": {"^.$": INTEGER, "^a$": {"minimum": 1}}},
        {"type": "number", "maximum": 2**63},
        *({"type": "string", "format": name} for name in sorted(UNKNOWN)),
    ],
    ids=lambda schema: " ".join(schema) + schema.get("format", ""),
)
def test_llguidance_alone_does_not_hold_what_is_worked_out_here(schema):
    with pytest.raises(BadRequest, match="cannot be compiled"):
        alone(schema)
    assert enforceable(schema)


def test_an_address_that_ends_in_an_older_one_is_held_here_alone():
    schema, text = {"type": "string", "format": "ipv6"}, '"::ffff:1.2.3.4"'
    assert takes(grammar_of(schema), text)
    assert not takes(alone(schema), text)


def test_a_declared_name_of_a_quote_is_lost_beside_a_pattern():
    """So it is refused there."""
    schema = {"type": "object", "properties": {'"': INTEGER}, "patternProperties": {"^.$": STRING}}
    assert not takes(alone({**schema, "additionalProperties": False}), '{"\\"": 1}')
    with pytest.raises(BadRequest, match="a property with a quote, backslash or control character"):
        enforceable(schema)


def test_many_optional_properties_end_a_text_in_the_middle():
    def optional(count):
        return {"type": "object", "properties": {f"p{n}": INTEGER for n in range(count)}}

    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        takes(alone({**optional(600), "additionalProperties": False}), '{"p1": 1, "p2": 2}')
    assert takes(grammar_of(optional(MOST_OPTIONAL)), '{"p1": 1, "p2": 2}')
    with pytest.raises(BadRequest, match="more than 400 optional properties"):
        enforceable(optional(MOST_OPTIONAL + 1))


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}], ids=str)
def test_a_reference_that_leads_to_itself_leaves_no_text(schema):
    with pytest.raises(BadRequest, match="NoExtension"):
        alone(schema).matcher().fill(np.zeros(WORDS, np.int32))
    with pytest.raises(BadRequest, match="only refers to itself"):
        enforceable(schema)


def test_a_text_that_never_ends_is_begun():
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    assert all(map(alone(endless).matcher().accept, spell('{"a": ' * 50)))
    with pytest.raises(BadRequest, match="no finite text fits"):
        enforceable(endless)


# xgrammar.


def test_xgrammar_alone_takes_bytes_that_are_no_text():
    grammar = compiled("grammar", "root ::= [^x]+").matcher()
    assert grammar._matcher.accept_token(0xED)
    assert grammar._matcher.accept_token(0xA0)


def test_xgrammar_alone_complains_of_tokens_that_spell_nothing(capfd):
    assert not compiled("grammar", "root ::= [^x]+").matcher()._matcher.accept_token(THINK)
    assert capfd.readouterr().err != ""


def test_xgrammar_alone_leaves_the_stop_tokens_of_its_compiler_in_a_row():
    grammar, row = compiled("grammar", "root ::= [^x]+").matcher([ord("x")]), np.zeros(WORDS, np.int32)
    grammar._matcher.fill_next_token_bitmask(row)
    assert STOP in tokens_in(row)
