"""``uniqueItems`` is enforced token by token: mask rows, against jsonschema and against fresh replays."""

import json
import math
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tandemrt.runtime.grammars.llguidance_matcher import LLGuidanceMatcher
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.grammars.unique.equality import may_become, number, same_number
from tandemrt.runtime.grammars.unique.places import Freedom, Places
from tests.plain.drawing import accepts, grammar_of

_MERGES = [b'","', b'", "', b'"a","a"', b"1,1,", b", 1", b", 1,", b"[[],[]", b"[],", b"},{", b'"}, {"', b"12", b"1]"]
_MERGES += [b"0, 0", b"true", b", true", b'"a', b'a"', b'ab", "', b"  ", b', "a"', b'{"a": 1}', b', {"a": 1', b"1.0]"]
_MERGES += [b'": [1, 1', b'["a", "', b"\\u00", b"\\u0061", b"e5,", b"00", b"]]", b'\xc3\xa9"', b", "]
STOP = 256 + len(_MERGES)
VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), *_MERGES, b""), frozenset([STOP]), STOP + 1)
WORDS = (STOP + 32) // 32

ITEMS = [
    {},
    {"type": "string"},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    {"type": "string", "pattern": "^(a|é)x?b$"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "number"},
    {"enum": ["a", "ab", "abc", 1, 10, 1.5, True, None, [1], {"a": 1}]},
    {"type": "array", "items": {"enum": ["a", "ab", 1]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "boolean"}, {"type": "null"}]},
]
_LIMITS = st.fixed_dictionaries({}, optional={"minItems": st.integers(0, 3), "maxItems": st.integers(3, 6)})


def arrays(items):
    return st.builds(lambda item, more: {"type": "array", "items": item, "uniqueItems": True} | more, items, _LIMITS)


SCHEMAS = st.one_of(
    arrays(st.sampled_from(ITEMS)),
    arrays(arrays(st.sampled_from(ITEMS[:9]))),
    st.builds(
        lambda one, other: {"type": "object", "properties": {"p": one, "q": other}, "required": ["p", "q"]},
        arrays(st.sampled_from(ITEMS)),
        arrays(st.sampled_from(ITEMS)),
    ),
    st.builds(
        lambda first, rest: {"type": "array", "prefixItems": first, "items": rest, "uniqueItems": True},
        st.lists(st.sampled_from(ITEMS), min_size=1, max_size=2),
        st.sampled_from(ITEMS),
    ),
)
SETS_OF_SETS = {"type": "array", "items": ITEMS[10], "uniqueItems": True, "minItems": 3, "maxItems": 4}


WHITESPACE = st.sampled_from(["compact", "bounded", "any"])


def compiled(schema, whitespace):
    compiler = GrammarCompiler(VOCABULARY, [STOP])
    return compiler.compile("json", json.dumps(enforceable(schema)), whitespace=whitespace)


def row_of(matcher):
    row = np.zeros(WORDS, np.int32)
    matcher.fill_row(row)
    return row


def tokens_of(row):
    return [token for token in range(STOP + 1) if bitmask.allows(row, token)]


def draw_token(chance, tokens):
    closing = [token for token in tokens if token == STOP or (token < 256 and chr(token) in '"}]')]
    readable = [token for token in tokens if 0x20 <= token < 0x7F or token >= 256]
    few = [token for token in readable if token >= 256 or chr(token) in '01ab",[]{} :.e']
    return chance.choice(closing if closing and chance.random() < 0.2 else few or readable or tokens)


# Shrinking takes minutes; the seed and the schema say enough.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(schema=SETS_OF_SETS, whitespace="any", seed=24526145)  # where looking ahead for a whole row ends at its limit
@given(schema=SCHEMAS, whitespace=WHITESPACE, seed=st.integers(0, 2**32 - 1))
def test_random_texts_are_valid_and_rows_equal_those_of_a_replay(schema, whitespace, seed):
    written = walk(compiled(schema, whitespace), random.Random(seed), 30)
    if written is not None:
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(written)), written


def walk(grammar, chance, length):
    """Write a random text of at most ``length`` tokens, with rollbacks, forks and drafts. Returns it if it ended."""
    matcher, text, ended = grammar.matcher(), list[int](), False
    while not ended and len(text) < length:
        row = row_of(matcher)
        if chance.random() < 0.3:
            replay = grammar.matcher()
            assert all(map(replay.accept, text))
            assert np.array_equal(row, row_of(replay))
        legal = tokens_of(row)
        assert legal, bytes(b"".join(VOCABULARY.tokens[token] for token in text))
        for token in chance.sample(range(STOP + 1), 4) + chance.sample(legal, min(4, len(legal))):
            taken = matcher.accept(token)
            assert taken == (token in legal)
            matcher.rollback(int(taken))
        match chance.randrange(4):
            case 0:
                back = chance.randint(0, len(text))
                matcher.rollback(back)
                del text[len(text) - back :]
                continue
            case 1:
                matcher, before = matcher.fork(), matcher
                before.accept(legal[0])
            case 2:
                ahead = matcher.fork()
                draft: list[int] = []
                while len(draft) < 4 and not ahead.is_terminated():
                    draft.append(draw_token(chance, tokens_of(row_of(ahead))))
                    assert ahead.accept(draft[-1])
                matcher.precompute_rows(draft)
        token = draw_token(chance, legal)
        assert matcher.accept(token)
        ended = token == STOP
        text += [] if ended else [token]
    return b"".join(VOCABULARY.tokens[token] or b"@" for token in text) if ended else None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1", "1.0", True),
        ("1", "10e-1", True),
        ("0", "-0.0", True),
        ("9007199254740993", "9007199254740992.0", True),  # for a reader of doubles
        ("1", "true", False),
        ("0", "false", False),
        ("null", '"null"', False),
        ('"a"', r'"\u0061"', True),
        ('"/"', r'"\/"', True),
        ('"\U0001f600"', r'"\ud83d\ude00"', True),
        ('"a"', '"a "', False),
        ('{"a": 1, "b": [2]}', '{"b": [2.0], "a": 1}', True),
        ('{"a": 1, "b": 2}', '{"a": 1}', False),
        ("[[1], [true]]", "[[true], [1]]", False),
        ("[]", "{}", False),
        ("[1, 2]", "[2, 1]", False),
    ],
)
def test_items_are_equal_as_json_schema_says(one, other, equal):
    grammar = grammar_of({"type": "array", "uniqueItems": True}, whitespace="any")
    assert accepts(grammar, f"[{one} ,{other}]") == (not equal)
    assert accepts(grammar, f"[{other}, 5, {one}]") == (not equal)


@pytest.mark.parametrize(
    ("item", "count"),
    [
        ({"enum": ["a", "ab", "abc", "b", 1, 10, True, None]}, 8),
        ({"type": "string", "pattern": "^(a|b)x?y$"}, 4),
        ({"type": "integer", "minimum": 0, "maximum": 11}, 12),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, 5),
        ({"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}, 9),
        ({"type": "object", "patternProperties": {"^[ab]$": {"type": "boolean"}}}, 9),
    ],
)
def test_an_array_of_all_values_never_runs_dry(item, count):
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": count}
    grammar, chance = compiled(schema, whitespace="compact"), random.Random(0)
    for _ in range(2):
        matcher, text = grammar.matcher(), list[int]()
        while legal := [token for token in tokens_of(row_of(matcher)) if token < 256]:
            text.append(chance.choice(legal))
            assert matcher.accept(text[-1])
        assert matcher.accept(STOP)
        assert len(json.loads(bytes(text))) == count


def test_each_unique_array_has_its_own_items():
    item = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    }
    grammar = grammar_of({"type": "array", "items": item})
    assert accepts(grammar, '[{"tags": ["a", "b"]}, {"tags": ["a", "b"]}]')
    assert not accepts(grammar, '[{"tags": ["a", "b"]}, {"tags": ["a", "a"]}]')


STRINGS = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (  # the last of the first items is no further one
            {"type": "array", "prefixItems": [{"uniqueItems": False} | STRINGS, STRINGS | {"uniqueItems": True}]}
            | {"items": STRINGS},
            '[["a", "a"], ["a", "b"], ["a", "a"]]',
            '[["a", "b"], ["a", "a"]]',
        ),
        (  # the second of two alternatives that the text may still be
            {
                "anyOf": [
                    {"type": "object", "properties": {"k": STRINGS, "v": {"const": 1}}, "required": ["v"]},
                    {"type": "object", "properties": {"k": STRINGS | {"uniqueItems": True}, "v": {"const": 2}}},
                ]
            },
            '{"k": ["a", "b"], "v": 2}',
            '{"k": ["a", "a"], "v": 2}',
        ),
    ],
)
def test_items_of_the_second_place_are_unique(schema, good, bad):
    grammar = grammar_of(schema)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_integers_of_400_digits_are_compared_exactly_and_longer_ones_are_no_doubles():
    one, other = 10**399, 10**399 + 1
    assert (number(str(one)), number(str(other))) == (one, other)
    assert number("1" + "0" * 400) == math.inf


@pytest.mark.parametrize(("length", "free"), [(2, Freedom.UNLESS_COMPLETE), (1, Freedom.UNKNOWN)])
def test_a_short_string_may_run_out_of_other_values(length: int, free: Freedom) -> None:
    items = {"type": "string", "maxLength": length}
    assert Places({"type": "array", "items": items, "uniqueItems": True}).root[0].freedom == free


def test_a_reference_to_itself_keeps_the_items_of_each_level_apart():
    tree = {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}
    grammar = grammar_of(tree)
    assert accepts(grammar, "[[], [[]], [[], [[]]]]")
    assert not accepts(grammar, "[[], [[]], [[]]]")
    assert not accepts(grammar, "[[[], []]]")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"contains": True, "minItems": 1}, "[1]", "[]"),
        ({"prefixItems": [{"const": 1}, {"enum": [1, 2]}]}, "[1, 2]", "[1, 1]"),
        ({"items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, "[1, 2]", "[1, 1]"),
        ({"allOf": [{"items": {"type": "integer"}}]}, "[1, 2]", "[1, 1]"),
    ],
)
def test_unique_items_combine_with_other_keywords(schema, good, bad):
    grammar = grammar_of({"type": "array", "uniqueItems": True, **schema})
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_a_property_named_like_the_keyword_is_an_ordinary_one():
    schema = {"type": "object", "properties": {"uniqueItems": {"enum": [True, {"uniqueItems": True}]}}}
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"uniqueItems": true}')
    assert accepts(grammar, '{"uniqueItems": {"uniqueItems": true}}')


@example(0.0, 249_999_999_999_999_984, 2)  # rounds to 2.5e17
@example(0.0, 999_999_999_999_999_990, 2)  # and to 1e18
@given(st.floats(allow_nan=False), st.integers(-(10**20), 10**20), st.integers(1, 12))
def test_a_beginning_of_a_number_may_become_the_number(real, whole, length):
    for text in (json.dumps(whole), json.dumps(real) if np.isfinite(real) else "0", f"{whole}.000"):
        value = json.loads(text)
        assert same_number(number(text), value)
        assert may_become(text[:length], value) or text[:length] == "-"


def bounded(**bounds):
    return {"type": "array", "items": {"type": "number", **bounds}, "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "begun", "dead"),
    [
        (bounded(minimum=0, maximum=1, multipleOf=0.5), "[1, ", "1"),
        (bounded(minimum=0, maximum=1, multipleOf=0.5), "[1, 0.5, ", "1"),
        (bounded(minimum=-1, maximum=0, multipleOf=0.5), "[-1, -", "1"),
        (bounded(minimum=0, maximum=1), "[0.1, 0.100000000000000", "00"),  # every number from here is the same double
        (bounded(minimum=-1, maximum=1), "[-0.1, -0.100000000000000", "00"),
    ],
)
def test_a_number_that_can_no_longer_differ_is_not_begun(monkeypatch, schema, begun, dead):
    matcher = compiled(schema, "compact").matcher()
    for byte in begun.encode():
        assert matcher.accept(byte)
    row, rows = np.empty(WORDS, np.int32), []
    fill_row = LLGuidanceMatcher.fill_row
    monkeypatch.setattr(LLGuidanceMatcher, "fill_row", lambda self, row: (rows.append(1), fill_row(self, row)))
    matcher.fill_row(row)
    assert not bitmask.allows(row, next(t for t, text in enumerate(VOCABULARY.tokens) if text == dead.encode()))
    assert bitmask.allows(row, ord("0"))
    assert len(rows) < 20


def test_a_number_whose_exponent_must_be_zero_is_not_begun_again():
    matcher, row = compiled(bounded(minimum=0, maximum=1), "compact").matcher(), np.empty(WORDS, np.int32)
    for byte in b"[1, 1e":
        assert matcher.accept(byte)
    matcher.fill_row(row)
    assert bitmask.allows(row, ord("-"))
    assert not bitmask.allows(row, ord("0"))


@pytest.mark.parametrize("seed", range(6))
def test_a_text_of_unique_numbers_between_bounds_never_gets_stuck(seed):
    chance = random.Random(seed)
    matcher, row = compiled(bounded(minimum=0, maximum=1), "compact").matcher(), np.empty(WORDS, np.int32)
    for _ in range(80):
        matcher.fill_row(row)
        legal = [token for token in range(STOP + 1) if bitmask.allows(row, token)]
        assert legal
        token = chance.choice([token for token in legal if token in {*b"01,. "}] or legal)
        assert matcher.accept(token)
        if token == STOP:
            break


def test_a_number_with_an_exponent_may_become_zero_by_rounding():
    assert same_number(number("5e-400"), 0)
    assert may_become("5e", 0)


CALL = STOP - 1  # a control token, spelled "@"
TAG_VOCABULARY = Vocabulary(
    (*VOCABULARY.tokens[:CALL], b"", b""), frozenset([CALL, STOP]), STOP + 1, control={"@": CALL}
)


def json_part(schema, **options):
    return {"type": "json_schema", "json_schema": schema, **options}


def compiled_tags(form, whitespace="bounded"):
    source, _ = read(StructuredOutputs(structural_tag={"type": "structural_tag", "format": form}))
    return GrammarCompiler(TAG_VOCABULARY, [STOP]).compile(source.kind, source.text, whitespace=whitespace)


def tag_formats(part):
    tag = {"type": "tag", "begin": "@[", "content": part, "end": ["]", ";@"]}
    number = {"type": "tag", "begin": "n", "content": json_part({"type": "number"}), "end": "@"}
    return {
        "triggered": {"type": "triggered_tags", "triggers": ["@", "n"], "tags": [tag, number], "at_least_one": True},
        "separated": {"type": "tags_with_separator", "tags": [tag, number], "separator": ", ", "at_least_one": True},
        "optional": {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": {**tag, "end": "]"}},
                {"type": "const_string", "value": "1,"},
                part,
            ],
        },
        "either": {"type": "or", "elements": [number, tag]},
        "after text": {
            "type": "sequence",
            "elements": [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "@1"}, part],
        },
    }


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    kind=st.sampled_from(list(tag_formats({}))),
    item=st.sampled_from(ITEMS),
    whitespace=WHITESPACE,
    seed=st.integers(0, 2**32 - 1),
)
def test_random_texts_of_tags_have_unique_items_and_rows_equal_those_of_a_replay(kind, item, whitespace, seed):
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": 1, "maxItems": 4}
    form = tag_formats(json_part(schema))[kind]
    written = walk(compiled_tags(form, whitespace), random.Random(seed), 24)
    for part in re.finditer(rb"(?:@\[|@1|1,)(?=\[)", written or b""):
        value, _ = json.JSONDecoder().raw_decode(written[part.end() :].decode())
        assert jsonschema.Draft202012Validator(schema).is_valid(value), written


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("triggered", "1,1 @[[1, 2]]; n1.5@x", "x@[[1]]n7@@[[1, 1]]"),
        ("separated", "@[[1, 2]], n1@, @[[2, 1]]", "n1@, @[[2, 2]]"),
        ("optional", "@[[1]]1,[1, 2]", "1,[1, 1]"),
        ("optional", "1,[1]", "@[[1, 1]]1,[1]"),
        ("either", "@[[1, 2];@", "@[[1, 1];@"),
        ("after text", "[1, 1]@1[1, 2]", "a@1[1, 1]"),
    ],
)
def test_items_of_a_json_part_of_a_tag_are_unique(kind, good, bad):
    item = {"type": "integer"}
    grammar = compiled_tags(tag_formats(json_part({"type": "array", "items": item, "uniqueItems": True}))[kind])
    for text, valid in ((good, True), (bad, False)):
        for spelled in ({}, {ord("@"): CALL}):
            matcher = grammar.matcher()
            assert (
                all(matcher.accept(spelled.get(byte, byte)) for byte in text.encode()) and matcher.accept(STOP)
            ) == valid


def text_followed_by(*texts):
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "@1", "followed_by": texts}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("<a@1b@1[[1, 2]]]", True),
        ("<a@1b@1[[1, 1]]]", False),
        ("<a@1@1[[1, 1]]]", False),
    ],
)
@pytest.mark.parametrize("spelled", [{}, {ord("@"): CALL}])
def test_a_text_in_a_tag_goes_on_until_a_json_part_begins(text, valid, spelled):
    part = json_part({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    json_tag = {"type": "optional", "content": {"type": "tag", "begin": "[", "content": part, "end": "]"}}
    elements = [text_followed_by("[", "]"), json_tag, {"type": "const_string", "value": "]"}]
    tag = {"type": "tag", "begin": "<", "content": {"type": "sequence", "elements": elements}, "end": ""}
    grammar = compiled_tags({"type": "triggered_tags", "triggers": ["<"], "tags": [tag]})

    def accepts(tokens):
        matcher = grammar.matcher()
        return all(map(matcher.accept, tokens)) and matcher.accept(STOP)

    assert accepts(spelled.get(byte, byte) for byte in text.encode()) == valid
    assert accepts(b"<a@1b@1]@1[[1, 1]]]")  # the tag ended, and free text is never JSON


def test_json_that_begins_right_after_a_text_that_may_go_on_is_rejected():
    part = json_part({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    with pytest.raises(BadRequest, match="the text before a JSON part must decide that it begins"):
        compiled_tags({"type": "sequence", "elements": [text_followed_by("["), part]})


def test_a_structural_tag_rejects_unique_items_of_unlisted_values_in_another_notation():
    def tags(item, style="json"):
        schema = {"type": "array", "items": item, "uniqueItems": True}
        tag = {"begin": "<a>", "content": json_part(schema, style=style), "end": "</a>"}
        form = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})

    assert read(tags({"enum": [1, 2]}, "python"))
    assert read(tags({"type": "string"}))
    with pytest.raises(BadRequest, match="only supported in JSON, received a part in the notation python"):
        read(tags({"type": "string"}, "python"))


def test_a_json_part_with_unique_items_must_begin_after_a_text_that_decides_it():
    part = json_part({"type": "array", "uniqueItems": True})
    tag = {"type": "tag", "begin": "@", "content": json_part({"type": "string"}), "end": "@"}
    with pytest.raises(BadRequest, match="uniqueItems: the text before a JSON part must decide that it begins"):
        compiled_tags({"type": "sequence", "elements": [{"type": "optional", "content": tag}, part]})


@pytest.mark.parametrize("token", [b" 1]", b"\n1]"])
def test_a_token_that_begins_with_white_space_repeats_no_item(token):
    vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), token, b""), frozenset([257]), 258)
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    grammar = GrammarCompiler(vocabulary, [257]).compile("json", json.dumps(enforceable(schema)), whitespace="any")
    for begun, allowed in ((b"[2,", True), (b"[1,", False)):
        matcher, row = grammar.matcher(), np.zeros(9, np.int32)
        assert all(map(matcher.accept, begun))
        matcher.fill_row(row)
        assert bitmask.allows(row, 256) == allowed
