"""Workarounds for grammar engines are still needed. Each test runs an engine without the workaround.

A test that fails shows that its workaround, and the test itself, can go.
"""

import json

import numpy as np
import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.grammars.schema.lowering import MAX_OPTIONAL
from tests.plain.constraints import STOP, THINK, WORDS, byte_tokens, compiled, compiler, tokens_in
from tests.plain.drawing import accepts, grammar_of

INTEGER = {"type": "integer"}


def alone(schema):
    """Return the grammar of the unmodified schema."""
    return compiler().compile("json", json.dumps(schema), whitespace="compact")


def test_many_optional_properties_make_llguidance_end_a_text_early():
    def optional(count):
        return {"type": "object", "properties": {f"p{n}": INTEGER for n in range(count)}}

    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        accepts(alone({**optional(600), "additionalProperties": False}), '{"p1": 1, "p2": 2}')
    assert accepts(grammar_of(optional(MAX_OPTIONAL)), '{"p1": 1, "p2": 2}')
    with pytest.raises(BadRequest, match="more than 400 properties are not supported if they are optional"):
        enforceable(optional(MAX_OPTIONAL + 1))


def test_a_reference_to_itself_leaves_llguidance_without_a_text():
    schema = {"$ref": "#"}
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
