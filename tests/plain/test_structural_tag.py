"""Structural tags: text between tags is free, content of tags is enforced, independent of how tokens split it."""

import itertools
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
import xgrammar.structural_tag
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.compiler import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.sources import QUICK_CHARACTERS, enforceable_tags, read
from tandemrt.runtime.grammars.structural_tag import MAX_FOLLOWED_END, MAX_PARTS, MAX_TRIGGERS, Part, parse
from tandemrt.runtime.grammars.tag_grammar import TagGrammar, split_controls
from tests.plain.constraints import CALL, STOP, VOCABULARY, WORDS, byte_tokens, tokens_in

TOOL = "<tool>"  # the text of the control token CALL
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


def content(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def triggered(*tags: dict[str, Any], triggers: tuple[str, ...] = (TOOL,), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags], **more}


CALLS = triggered(tag(TOOL + "f ", content(SCHEMA)), tag(TOOL + "g ", content(INTEGER)))
WORD = {"type": "regex", "pattern": "[a-z]+"}
FIXED, DIGITS = ({"type": "const_string", "value": value} for value in ("xy", "1;"))


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
    """Return byte tokens, with ``TOOL`` as its control token."""
    parts = [byte_tokens(part) for part in text.split(TOOL)]
    return [token for at, part in enumerate(parts) for token in ([CALL] if at else []) + part]


def optional(begin: str) -> dict[str, Any]:
    return {"type": "optional", "content": tag(begin, WORD, ";")}


def closed(begin: str) -> dict[str, Any]:
    """A sequence that begins with a fixed text, or with that in a tag that may be left out."""
    return {"type": "sequence", "elements": [tag(begin, WORD, ";")]}


def going_on(
    followed_by: list[str], *following: dict[str, Any], content: Any = None, end: str = "aa"
) -> dict[str, Any]:
    """A sequence that begins with a tag with ``followed_by``."""
    first = tag("<", content or {"type": "any_text"}, end) | {"followed_by": followed_by}
    return {"type": "sequence", "elements": [first, *following]}


def accepts(form: dict[str, Any], tokens: list[int]) -> bool:
    matcher = grammar(form)
    return all(map(matcher.accept, tokens)) and matcher.accept(STOP)


def between_brackets(*, separator: str = ", ", end: str = ";", **options: bool) -> dict[str, Any]:
    """Tags with a text before and after them."""
    tags = [tag("<a>", WORD, end), tag("<b>", WORD, end)]
    separated = {"type": "tags_with_separator", "tags": tags, "separator": separator, **options}
    texts = [{"type": "const_string", "value": value} for value in "[]"]
    return {"type": "sequence", "elements": [texts[0], separated, texts[1]]}


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
            triggered(tag("<a>", {"type": "any_text"}, "</a>"), tag("{", content(SCHEMA), ""), triggers=("<a>", "{")),
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
        (
            triggered(tag("<t>", WORD, ";"), tag("<u>", WORD, ";"), triggers=("<", "<t")),
            ["", "a<t>x;", "<u>x;b<t>y;"],
            ["<", "<t", "<x", "<t>X;"],
        ),
        (
            {"type": "sequence", "elements": [optional("<a>"), optional("<b>"), tag("", WORD, "!")]},
            ["x!", "<a>x;y!", "<b>x;y!", "<a>x;<b>y;z!"],
            ["", "<a>x;", "<b>x;<a>y;z!", "<a>x;<a>y;z!"],
        ),
        (
            {"type": "or", "elements": [tag("get", closed("<"), ""), tag("get_all", closed("<"), "")]},
            ["get<x;", "get_all<x;"],
            ["get_<x;", "getx;"],
        ),
        (content(SCHEMA), ['{"a": 1}', '{"a":1}', '{\n  "a" : 1\n}'], ['{"a":"1"}', "{}", '{  "a":1}', ' {"a":1}']),
        (
            between_brackets(at_least_one=True),
            ["[<a>x;]", "[<a>x;, <b>y;]", "[<a>x;, <a>y;, <b>z;]"],
            ["[]", "[<a>x;", "[<a>x;, ]", "<a>x;]", "[<a>x;<b>y;]", "[<a>x;]]"],
        ),
        (
            between_brackets(at_least_one=True, stop_after_first=True),
            ["[<a>x;]", "[<b>x;]"],
            ["[]", "[<a>x;, <b>y;]"],
        ),
        (
            {"type": "sequence", "elements": [content({"type": ["null", "boolean"]}), DIGITS]},
            ["null1;", "true1;"],
            ["null", "1;", '"x"1;', "nulltrue1;"],
        ),
    ],
)
def test_a_format_accepts_exactly_its_texts(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(form, tokens_of(text)), text
        assert accepts(form, byte_tokens(text)), text  # the text of a control token in byte tokens
    for text in bad:
        assert not accepts(form, tokens_of(text)), text
        assert not accepts(form, byte_tokens(text)), text


@pytest.mark.parametrize(("end", "followed_by"), [("aa", ["b"]), ("aba", ["c", "abc"]), ("ab", ["c", "a"])])
@pytest.mark.parametrize("excludes", [[], ["cb"]])
def test_a_tag_goes_on_after_an_end_that_nothing_of_followed_by_follows(
    end: str, followed_by: list[str], excludes: list[str]
) -> None:
    free = {"type": "any_text", "excludes": excludes}
    following = {"type": "or", "elements": [{"type": "const_string", "value": value} for value in followed_by]}
    form = {"type": "sequence", "elements": [tag("<", free, end) | {"followed_by": followed_by}, following]}
    matcher = compiled(form).matcher

    def accepts_text(text: str) -> bool:
        state = matcher()
        return all(map(state.accept, byte_tokens(f"<{text}"))) and state.accept(STOP)

    ends = [end + text for text in followed_by]
    for text in ("".join(letters) for size in range(8) for letters in itertools.product("abc", repeat=size)):
        first = min((at for at in range(len(text)) if text.startswith(tuple(ends), at)), default=None)
        ended = first is not None and text[first:] in ends and not any(map(text[: first + len(end)].count, excludes))
        assert accepts_text(text) == ended, text


def test_the_older_form_is_equivalent() -> None:
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
def test_tags_in_random_texts_are_valid_and_every_row_equals_a_fresh_replay(calls: CompiledGrammar, seed: int) -> None:
    """The random text prefers tags. An independent reader checks them."""
    draw, text, state = random.Random(seed), list[int](), calls.matcher()
    row, fresh = np.zeros(WORDS, np.int32), np.zeros(WORDS, np.int32)
    for at in range(50):
        state.fill_row(row)
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
            replay.fill_row(fresh)
            state.fill_row(row)
            assert (row == fresh).all()
    check_tags("".join(TOOL if each == CALL else TAGGED.tokens[each].decode("latin-1") for each in text))


def check_tags(text: str) -> None:
    """Raise unless every complete tag in ``text`` is one of CALLS."""
    while TOOL in text:
        _, _, text = text.partition(TOOL)
        name, text = text[:2], text[2:]
        assert ("f ".startswith(name) or "g ".startswith(name)) or not text
        match = re.match(r'(\{\s*"a"\s*:\s*(?:1|"(?:[^"\\]|\\.)*")\s*\}|\d+)</tool>', text)
        if match is None:
            assert TOOL not in text
            return
        jsonschema.validate(json.loads(match[1]), SCHEMA if name == "f " else INTEGER)
        text = text[match.end() :]


def test_fast_forward_tokens_stop_before_a_control_token() -> None:
    state = grammar({"type": "const_string", "value": f"ab{TOOL}c"})
    assert TAGGED.symbols_of(state.fast_forward_tokens()) == tuple(b"ab")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "qwen_xml"}, "type: must be one of .*'triggered_tags'"),
        ({"type": "const_string"}, "value: is required and missing"),
        ({"type": "const_string", "value": "a", "x": 1}, "unknown key 'x'"),
        ({"type": "sequence", "elements": [WORD, {"type": "const_string", "value": "a"}]}, "must come last"),
        ({"type": "sequence", "elements": [CALLS, {"type": "const_string", "value": "a"}]}, "must come last"),
        (
            {"type": "sequence", "elements": [content({}), {"type": "const_string", "value": "1"}]},
            "must not begin with one of",
        ),
        (
            {"type": "sequence", "elements": [content(INTEGER), {"type": "or", "elements": [FIXED, DIGITS]}]},
            "must not begin with one of",
        ),
        (between_brackets(at_least_one=False), "must come last"),
        (between_brackets(at_least_one=True, separator="]"), "must differ from their separator"),
        (between_brackets(at_least_one=True, separator="];"), "must differ from their separator"),
        (between_brackets(at_least_one=True, end=""), "must come last"),
        ({"type": "sequence", "elements": [content({}), content({})]}, "must not begin with one of"),
        ({"type": "sequence", "elements": [content({"type": ["null", "integer"]}), DIGITS]}, "must not begin with one"),
        ({"type": "or", "elements": [WORD, content({})]}, "must begin with a fixed text"),
        (triggered(tag("<a>", WORD), triggers=("<b>",)), "must begin with a trigger, got '<a>'"),
        (triggered(tag("<a>", WORD), tag("<a>b", WORD), triggers=("<a>",)), "got '<a>' and '<a>b'"),
        (triggered(tag("x<a>", WORD), triggers=("x<a>", "<a>")), "must not contain another one"),
        (triggered(tag("<a>", WORD, ""), triggers=("<a>",)), "must come last"),
        (triggered(tag("<a>", content({}), "0"), triggers=("<a>",)), "must not begin with one of"),
        (triggered(tag("<a>", content({}), ""), triggers=("<a>",)), "must not begin with one of"),
        (triggered(tag("<a>", WORD, ["", "b"]), triggers=("<a>",)), "end must not contain an empty text"),
        (triggered(tag("<a>", CALLS, "b"), triggers=("<a>",)), "tags must not be the last part of a tag"),
        (triggered(tag("<a>", content({"type": "array", "contains": {"const": 1}})), triggers=("<a>",)), "contains"),
        (triggered(tag("<a>", content({"type": 5})), triggers=("<a>",)), "not a JSON schema"),
        (triggered(tag("<a>", {"type": "regex", "pattern": "(?=a)b"}), triggers=("<a>",)), "cannot be enforced"),
        (
            triggered(tag("<a>", {"type": "regex", "pattern": "a+"}, "a"), triggers=("<a>",)),
            "no text fits an expression",
        ),
        *(
            (
                {
                    "type": "sequence",
                    "elements": [{"type": "or", "elements": either}, {"type": "const_string", "value": "1"}],
                },
                "must not begin with one of",
            )
            for either in permutations([content({"type": "string"}), content({"type": "integer"})])
        ),
        (CALLS | {"excludes": ["<too"]}, "no text fits .* a trigger with its exclusions"),
        (triggered(tag(f"x{TOOL}", WORD), triggers=(f"x{TOOL}",)), "must be the beginning of a trigger"),
        (going_on(["b"], {"type": "const_string", "value": "c"}), "must begin with one of its followed_by"),
        (going_on(["b"], optional("b"), optional("c"), tag("b", WORD)), "must begin with one of its followed_by"),
        (going_on(["b"], optional("b")), "must begin with one of its followed_by"),
        (going_on(["a"], {"type": "const_string", "value": "a"}), "must not begin inside the end"),
        (
            going_on(["b"], {"type": "const_string", "value": "b"}, content=WORD),
            "content must be any_text with one end",
        ),
        (going_on(["b"], {"type": "const_string", "value": "b"}, end=""), "content must be any_text with one end"),
    ],
)
def test_tags_that_cannot_be_enforced_exactly_are_rejected(form: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        grammar(form)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([], "must be a valid dictionary"),
        ("[]", "must be an object of type structural_tag"),
        ("{", "structural_tag: the value is not JSON"),
        ({"type": "other", "format": {}}, "must be an object of type structural_tag"),
        ({}, "must have format, or structures and triggers, and not both"),
        ({"format": CALLS, "triggers": []}, "'triggers' is not a known key"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "tags.0.end: is required and missing"),
        ({"structures": 5, "triggers": ["a"]}, "structures must be a list of objects"),
        ({"structures": [], "triggers": ["a"]}, "tags: must not be empty"),
        *(
            (
                {
                    "format": {
                        "type": "tags_with_separator",
                        "separator": ",",
                        "tags": [tag("", content({"type": kinds}))],
                    }
                },
                "not a JSON schema at #/type",
            )
            for kinds in ([], [{}], [["null"]], {}, 5, "text")
        ),
        (
            {"format": {"type": "optional", "content": {"type": "tag", "begin": "<a>", "content": WORD, "end": ""}}},
            "an optional tag must have a begin and an end",
        ),
    ],
)
def test_invalid_structural_tags_are_rejected(tag: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read(StructuredOutputs(structural_tag=tag))


ONE_OPTIONAL = {"type": "optional", "content": tag("<a>", WORD)}
MANY_OPTIONAL = {"type": "sequence", "elements": [*[ONE_OPTIONAL] * (MAX_PARTS - 1), FIXED]}
LARGE = {
    "an end that overlaps itself": tag("b", {"type": "any_text"}, "e" * 16_000),
    "parts that may be left out": {"type": "sequence", "elements": [FIXED, MANY_OPTIONAL]},
    "control tokens": tag(TOOL * 2500, FIXED),
    "triggers": triggered(tag("00001x", FIXED), triggers=tuple(f"{number:05}" for number in range(MAX_TRIGGERS))),
}


@pytest.mark.parametrize("form", LARGE.values(), ids=LARGE)
def test_a_large_tag_is_read_with_little_memory(form: dict[str, Any]) -> None:
    read(StructuredOutputs(structural_tag={"format": FIXED}))
    tracemalloc.start()
    try:
        source, _ = read(StructuredOutputs(structural_tag={"format": form}))
        TagGrammar(TAGGED.control, json.dumps).write(parse(json.loads(source.text)))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        (triggered(tag("0x", FIXED), triggers=("0",) * (MAX_TRIGGERS + 1)), "triggers: must have at most 256 items"),
        ({"type": "sequence", "elements": [FIXED] * (MAX_PARTS + 1)}, "elements: must have at most 1024 items"),
    ],
)
def test_the_parts_of_a_tag_are_bounded(form: dict[str, Any], rule: str) -> None:
    with pytest.raises(BadRequest, match=rule):
        read(StructuredOutputs(structural_tag={"format": form}))


@pytest.mark.parametrize(("length", "valid"), [(MAX_FOLLOWED_END, True), (MAX_FOLLOWED_END + 1, False)])
def test_the_length_of_an_end_is_bounded_where_the_text_may_go_on(length: int, valid: bool) -> None:
    followed = tag("b", {"type": "any_text"}, "e" * length) | {"followed_by": ["xy"]}
    tags = StructuredOutputs(structural_tag={"format": {"type": "sequence", "elements": [followed, FIXED]}})
    if valid:
        read(tags)
        return
    with pytest.raises(
        BadRequest, match=r"an end must have at most 256 characters where followed_by is given, got 257"
    ):
        read(tags)


@pytest.mark.parametrize("size", [10, QUICK_CHARACTERS])
def test_only_a_long_tag_is_read_in_a_worker_process(size: int) -> None:
    calls: list[Any] = []

    def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
        calls.append(function)
        return function(*arguments)

    tags = StructuredOutputs(structural_tag={"format": {"type": "const_string", "value": "x" * size}})
    assert read(tags, in_worker) == read(tags)
    assert calls == ([] if size == 10 else [enforceable_tags])


@pytest.mark.parametrize("text", ["", "a", TOOL, f"a{TOOL}b", TOOL * 2, f"{TOOL}a{TOOL}"])
def test_control_tokens_split_a_text(text: str) -> None:
    longer = f"{TOOL}a"
    parts = split_controls(text, {TOOL: 1, longer: 2})
    assert "".join({1: TOOL, 2: longer}.get(part, part) for part in parts) == text
    assert parts.count(2) == text.count(longer)


OF_XGRAMMAR = {
    kind.model_fields["type"].default: kind.model_fields
    for kind in vars(xgrammar.structural_tag).values()
    if isinstance(kind, type) and "type" in getattr(kind, "model_fields", {})
}


@pytest.mark.parametrize("kind", Part.__subclasses__())
def test_an_absent_field_has_the_default_of_xgrammar(kind: type[Part]) -> None:
    (name,) = get_args(kind.model_fields["type"].annotation)
    for field, ours in kind.model_fields.items():
        if field not in ("type", "followed_by"):
            theirs = OF_XGRAMMAR[name][field]
            assert ours.is_required() == theirs.is_required()
            assert (list(ours.default) if ours.default == () else ours.default) == theirs.default
