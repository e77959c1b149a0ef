"""Grammars on real vocabularies: rows allow exactly the valid texts."""

import json
from random import Random

import jsonschema
import numpy as np
import pytest

from tandemrt.engines.contract.masks import mask_words
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.requests.text import TextStream
from tests.vocabularies.conftest import Family

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["naïve", "你好", "line\nbreak", 7, None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-zé😀]{1,4}$"}, "maxItems": 3},
        "count": {"type": "integer", "minimum": -5, "maximum": 5000},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "tags", "count"],
    "additionalProperties": False,
}
OBJECTS = [
    {"name": "", "kind": "naïve", "tags": [], "count": 0},
    {"name": "Ünï 😀", "kind": "你好", "tags": ["é", "abc", "😀é"], "count": -5, "ok": True},
    {"name": '"\\\n\u2028', "kind": "line\nbreak", "tags": ["zz"], "count": 5000, "ok": False},
    {"name": "<b> </", "kind": None, "tags": ["a", "b", "c"], "count": 42},
]
WRONG = [
    {"name": "far too long", "kind": 7, "tags": [], "count": 0},
    {"name": "", "kind": "nobody", "tags": [], "count": 0},
    {"name": "", "kind": 7, "tags": ["Z"], "count": 0},
    {"name": "", "kind": 7, "tags": [], "count": 5001},
]


@pytest.fixture
def compiled(family: Family):
    source = json.dumps(enforceable(SCHEMA))
    return family.compiler.compile("json", source, whitespace="compact")


def fill(family: Family, state, tokens):
    rows = np.zeros((len(tokens) + 1, mask_words(family.width)), np.int32)
    return state.fill_rows(tokens, MaskRows(rows), 0).tokens, rows


def test_valid_objects_are_accepted_in_any_tokenization_and_others_rejected(family: Family, compiled) -> None:
    random = Random(6)
    for value in [*OBJECTS, *WRONG]:
        ids = family.encode(json.dumps(value, ensure_ascii=False))
        for tokens in (ids, family.retokenize(ids, random)):
            state = family.constraint(grammar=compiled.matcher())
            taken, _ = fill(family, state, [*tokens, family.stop])
            assert (len(taken) > len(tokens)) == (value in OBJECTS), (value, tokens)


def test_the_rows_of_a_draft_window_equal_those_of_single_tokens(family: Family, compiled) -> None:
    tokens = family.encode(json.dumps(OBJECTS[1], ensure_ascii=False))
    state = family.constraint(grammar=compiled.matcher())
    _, rows = fill(family, state, tokens)
    for row, token in zip(rows, tokens, strict=False):
        np.testing.assert_array_equal(row, fill(family, state, [])[1][0])
        state.commit([token])


def test_random_texts_from_the_rows_are_valid_without_control_tokens(family: Family, compiled) -> None:
    random, control = Random(7), np.array(sorted(family.vocabulary.special - {family.stop}))
    for _ in range(6):
        state = family.constraint(grammar=compiled.matcher())
        text_stream, tokens, text = TextStream(family.backend), list[int](), ""
        while not state.finished:
            row = family.row(state)
            assert not row[control].any()
            assert not row[family.vocabulary.valid_tokens :].any()
            token = int(random.choice(np.flatnonzero(row)))
            if state.commit([token]).finish is None:
                tokens.append(token)
                text_stream.add("answer", [token])
                text += text_stream.take().text
        text_stream.finish()
        text += text_stream.take().text
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text.encode() == bytes(family.vocabulary.symbols_of(tokens))
        assert text == family.tokenizer.decode(tokens)


def test_an_ebnf_grammar_never_splits_a_character(family: Family) -> None:
    """xgrammar's rows must never begin a character that they cannot complete."""
    compiled = family.compiler.compile("grammar", 'root ::= "[" ([a-z] | "é" | "😀" | "\\n")+ "]"')
    state = family.constraint(grammar=compiled.matcher())
    ids = family.encode("[é😀ab\n\n]")
    assert fill(family, state, [*family.retokenize(ids, Random(8)), family.stop])[0][-1] == family.stop
    assert len(fill(family, state, family.encode("[é,]"))[0]) < len(family.encode("[é,]"))
