"""Structural tags: what is written between them is free, what they hold is held, however tokens cut it."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.constraints.grammar import Grammar
from tandemrt.runtime.grammars.grammar import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.structured import read
from tests.plain.constraints import CALL, STOP, VOCABULARY, WORDS, spell, tokens_in

TOOL = "<tool>"  # a control token, CALL
TAGGED = replace(VOCABULARY, control={TOOL: CALL})
COMPILER = GrammarCompiler(TAGGED, [STOP])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "</tool>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}


def tag(begin: str, content: dict[str, Any], end: Any = "</tool>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def triggered(*tags: dict[str, Any], triggers: tuple[str, ...] = (TOOL,), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags], **more}


CALLS = triggered(tag(TOOL + "f ", held(SCHEMA)), tag(TOOL + "g ", held(INTEGER)))
WORD = {"type": "regex", "pattern": "[a-z]+"}


def compiled(form: dict[str, Any]) -> CompiledGrammar:
    source, check = read(StructuredOutputs(structural_tag={"type": "structural_tag", "format": form}))
    assert check is None
    return COMPILER.compile(source.kind, source.text)


def grammar(form: dict[str, Any]) -> Grammar:
    return compiled(form).matcher()


@pytest.fixture(scope="module")
def calls() -> CompiledGrammar:
    return compiled(CALLS)


def tokens_of(text: str) -> list[int]:
    """The tokens of a text, ``TOOL`` as its control token."""
    parts = [spell(part) for part in text.split(TOOL)]
    return [token for at, part in enumerate(parts) for token in ([CALL] if at else []) + part]


def takes(form: dict[str, Any], tokens: list[int]) -> bool:
    matcher = grammar(form)
    return all(map(matcher.accept, tokens)) and matcher.accept(STOP)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (CALLS, ["", "a <", "<tool", 'x <tool>f {"a": 1}</tool> y <tool>g 7</tool>', "<tool>g 12</tool>"], ["<tool>h"]),
        (CALLS, ['<tool>f {"a": "</tool>"}</tool>'], ['<tool>f {"a": 2}</tool>', '<tool>f {"a": 1}', "<tool>"]),
        (CALLS | {"at_least_one": True}, ["<tool>g 1</tool>", "a<tool>g 1</tool>b"], ["", "a"]),
        (CALLS | {"stop_after_first": True}, ["", "a", "a<tool>g 1</tool>"], ["<tool>g 1</tool>b"]),
        (CALLS | {"at_least_one": True, "stop_after_first": True}, ["a<tool>g 1</tool>"], ["a", "<tool>g 1</tool>b"]),
        (CALLS | {"excludes": ["x"]}, ["a<tool>g 1</tool>"], ["ax", "x<tool>g 1</tool>"]),
        (
            triggered(tag("<a>", WORD, ["</a>", "!"]), triggers=("<a",)),
            ["<a>b</a>c", "<a>b!"],
            ["<ab", "<a>b", "<a>B!"],
        ),
        (
            triggered(tag("<a>", {"type": "any_text"}, "</a>"), tag("{", held(SCHEMA), ""), triggers=("<a>", "{")),
            ["<a>{</a>", "<a><a></a>", 'x{{"a": 1}y'],
            ["<a>", "{x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<a>", WORD, ";"), tag("<b>", WORD, ";")], "separator": ", "},
            ["", "<a>x;", "<a>x;, <b>y;"],
            ["<a>x;,", "<a>x;<b>y;", "x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<a>", WORD, ";")], "separator": ",", "at_least_one": True},
            ["<a>x;,<a>y;"],
            [""],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    tag("<r>", {"type": "any_text"}, "</r>"),
                    {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, tag("no: ", WORD, ".")]},
                ],
            },
            ["<r></r>yes", "<r>x</r>no: b."],
            ["yes", "<r>x</r>no: .", "<r>a</r></r>yes"],
        ),
        (held(SCHEMA), ['{"a": 1}'], ['{"a":1}', ' {"a": 1}']),
    ],
)
def test_a_format_takes_what_it_says_and_nothing_else(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert takes(form, tokens_of(text)), text
        assert takes(form, spell(text)), text  # a control token spelled out is its text
    for text in bad:
        assert not takes(form, tokens_of(text)), text
        assert not takes(form, spell(text)), text


def test_the_older_form_says_the_same() -> None:
    older = {
        "type": "structural_tag",
        "structures": [
            {"begin": TOOL + "f ", "schema": SCHEMA, "end": "</tool>"},
            {"begin": TOOL + "g ", "schema": INTEGER, "end": "</tool>"},
        ],
        "triggers": [TOOL],
    }
    newer = StructuredOutputs(structural_tag={"type": "structural_tag", "format": CALLS})
    for form in (older, json.dumps(older)):
        assert read(StructuredOutputs(structural_tag=form)) == read(newer)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tags_in_a_drawn_text_are_valid_and_every_row_is_that_of_a_fresh_replay(
    calls: CompiledGrammar, seed: int
) -> None:
    """A text is drawn row by row, with a liking for tags; what was written is read by a reader of its own."""
    draw, text, state = random.Random(seed), list[int](), calls.matcher()
    row, fresh = np.zeros(WORDS, np.int32), np.zeros(WORDS, np.int32)
    for at in range(50):
        state.fill(row)
        allowed = sorted(tokens_in(row))
        if draw.random() < 0.2 and CALL in allowed:
            token = CALL
        else:
            likely = [each for each in allowed if each < 256 and chr(each) in '<tool>/fg {}"a:10 ']
            token = draw.choice(likely or allowed)
        if token == STOP:
            break
        ahead = [each for each in draw.sample(allowed, min(3, len(allowed))) if each != STOP]
        assert state.accept(token)
        taken = sum(map(state.accept, ahead[:1]))
        state.rollback(taken)
        text.append(token)
        if at % 5 == 0:
            replay = calls.matcher()
            assert all(map(replay.accept, text))
            replay.fill(fresh)
            state.fill(row)
            assert (row == fresh).all()
    hold_up("".join(TOOL if each == CALL else TAGGED.tokens[each].decode("latin-1") for each in text))


def hold_up(text: str) -> None:
    """Raise unless every tag in ``text`` that has an end is one of CALLS."""
    while TOOL in text:
        _, _, text = text.partition(TOOL)
        name, text = text[:2], text[2:]
        assert ("f ".startswith(name) or "g ".startswith(name)) or not text
        found = re.match(r'(\{"a": (?:1|"(?:[^"\\]|\\.)*")\}|\d+)</tool>', text)
        if found is None:
            assert TOOL not in text
            return
        jsonschema.validate(json.loads(found[1]), SCHEMA if name == "f " else INTEGER)
        text = text[found.end() :]


def test_what_must_follow_is_known_up_to_a_control_token() -> None:
    state = grammar({"type": "const_string", "value": f"ab{TOOL}c"})
    assert TAGGED.spelled(state.forced()) == tuple(b"ab")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "qwen_xml"}, "type: must be one of .*'triggered_tags'"),
        ({"type": "const_string"}, "value: is required and missing"),
        ({"type": "const_string", "value": "a", "x": 1}, "unknown key 'x'"),
        ({"type": "sequence", "elements": [WORD, {"type": "const_string", "value": "a"}]}, "must stand last"),
        ({"type": "sequence", "elements": [CALLS, {"type": "const_string", "value": "a"}]}, "must stand last"),
        (
            {"type": "sequence", "elements": [held({}), {"type": "const_string", "value": "1"}]},
            "must not go on with one",
        ),
        ({"type": "sequence", "elements": [held({}), held({})]}, "must not go on with one"),
        ({"type": "or", "elements": [WORD, held({})]}, "must begin with a text of its own"),
        (triggered(tag("<a>", WORD), triggers=("<b>",)), "must begin with a trigger, got '<a>'"),
        (triggered(tag("<a>", WORD), tag("<a>b", WORD), triggers=("<a>",)), "got '<a>' and '<a>b'"),
        (triggered(tag("x<a>", WORD), triggers=("x<a>", "<a>")), "must not hold another one"),
        (triggered(tag("<a>", WORD, ""), triggers=("<a>",)), "must stand last"),
        (triggered(tag("<a>", held({}), "0"), triggers=("<a>",)), "must not go on with one"),
        (triggered(tag("<a>", held({}), ""), triggers=("<a>",)), "must not go on with one"),
        (triggered(tag("<a>", WORD, ["", "b"]), triggers=("<a>",)), "end must not be empty beside others"),
        (triggered(tag("<a>", CALLS, "b"), triggers=("<a>",)), "tags must not stand at the end of a tag"),
        (triggered(tag("<a>", held({"type": "array", "contains": {"const": 1}})), triggers=("<a>",)), "contains"),
        (triggered(tag("<a>", held({"type": 5})), triggers=("<a>",)), "not a JSON schema"),
        (triggered(tag("<a>", {"type": "regex", "pattern": "(?=a)b"}), triggers=("<a>",)), "cannot be enforced"),
        (
            triggered(tag("<a>", {"type": "regex", "pattern": "a+"}, "a"), triggers=("<a>",)),
            "no text fits an expression",
        ),
        (CALLS | {"excludes": ["<too"]}, "no text fits .* a trigger with what is excluded"),
        (triggered(tag(f"x{TOOL}", WORD), triggers=(f"x{TOOL}",)), "must be the beginning of a trigger"),
    ],
)
def test_what_would_not_be_held_to_the_letter_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        grammar(form)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be a valid dictionary"),
        ("[]", "must be an object of type structural_tag"),
        ("{", "structural_tag: it is not JSON"),
        ({"type": "other", "format": {}}, "must be an object of type structural_tag"),
        ({}, "must have format, or structures and triggers, and not both"),
        ({"format": CALLS, "triggers": []}, "'triggers' is no key of it"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "tags.0.end: is required and missing"),
        ({"structures": 5, "triggers": ["a"]}, "structures must be a list of objects"),
        ({"structures": [], "triggers": ["a"]}, "tags: must not be empty"),
    ],
)
def test_what_is_no_structural_tag_is_refused(given: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read(StructuredOutputs(structural_tag=given))
