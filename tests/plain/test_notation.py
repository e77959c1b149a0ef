"""Values in Python's and Gemma's notation: grammars enforce a schema on them, and they are read back as JSON."""

import ast
import json
import keyword
import string
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.compiler import CompiledGrammar
from tandemrt.runtime.grammars.notation import NOTATIONS
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.servers.openai.notation_reader import NotationReader
from tests.plain.constraints import STOP, byte_tokens, compiler

TEXTS = st.text(string.ascii_letters + "é😀 '\"\\\n\t{}[](),:=<|>", max_size=6)
NAMES = st.from_regex("[a-z_][a-z0-9_]{0,3}", fullmatch=True)
SCALARS = st.one_of(TEXTS, st.integers(-99, 99), st.sampled_from([0.5, -1e30, True, False, None]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)
ANY_OBJECT = {"type": "object", "additionalProperties": True}


@cache
def compiled(style: str, schema: str) -> CompiledGrammar:
    content = {"type": "json_schema", "json_schema": json.loads(schema), "style": style}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "(", "content": content, "end": ")"}}
    return compiler().compile("structural_tag", read(StructuredOutputs(structural_tag=tag))[0].text)


def accepts(style: str, schema: Any, text: str) -> bool:
    matcher = compiled(style, json.dumps(schema)).matcher()
    return all(map(matcher.accept, byte_tokens(f"({text})"))) and matcher.accept(STOP)


def read_back(style: str, text: str, size: int) -> Any:
    reader, unread, json_text = NotationReader(NOTATIONS[style]), "", ""
    for at in range(0, len(text), size):
        unread += text[at : at + size]
        new, used = reader.read(unread)
        unread, json_text = unread[used:], json_text + new
    assert reader.done
    return json.loads(json_text)


@given(value=VALUES, size=st.integers(1, 5))
def test_values_that_python_writes_are_read_back(value: Any, size: int) -> None:
    assert read_back("python", repr(value) + "\n", size) == value
    assert ast.literal_eval(NOTATIONS["python"].spelled(value)) == value


@settings(max_examples=40)
@given(arguments=ARGUMENTS.filter(lambda names: not any(map(keyword.iskeyword, names))), size=st.integers(1, 5))
def test_keyword_arguments_are_those_of_a_python_call(arguments: dict[str, Any], size: int) -> None:
    spelled = NOTATIONS["python_arguments"].spelled(arguments)
    call = ast.parse(f"f({spelled})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == arguments
    assert read_back("python_arguments", spelled + ")", size) == arguments
    assert accepts("python_arguments", ANY_OBJECT, spelled)


@settings(max_examples=40)
@given(arguments=ARGUMENTS, size=st.integers(1, 5))
def test_arguments_in_gemmas_form_are_accepted_and_read_back(arguments: dict[str, Any], size: int) -> None:
    spelled = NOTATIONS["gemma_arguments"].spelled(arguments)
    assert read_back("gemma_arguments", spelled + "}", size) == arguments
    assert accepts("gemma_arguments", ANY_OBJECT, spelled)


SCHEMA = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": "integer", "minimum": 0},
        "l": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "o": {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"enum": ["x", "it's", None]}}}
        | {"required": ["a"]},
        "t": {"$ref": "#/$defs/tree"},
        "p": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
        "w": {"type": "string", "pattern": "^[ab]+$"},
    },
    "required": ["q"],
    "additionalProperties": False,
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
}


@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
        (
            "python_arguments",
            [
                'q="a"',
                "q='a\"b\\'c'",
                'q="", n=3',
                "q='', n=3, l=[\"x\"]",
                "q='',l=['x', 'y']",
                'q="", o={"b": True, "a": "it\'s"}',
                "q='', o={'a': None}",
                "q='', t=[[], [[]]], p=[1, True]",
                "q='', p=[]",
                'q="", w="ab"',
            ],
            [
                "",
                "n=3",
                'q="a", n=-3',
                'q="a", n="3"',
                'q="a", l=[]',
                'q="a", l=["x", "y", "z"]',
                'q="a", o={"b": true, "a": "x"}',
                'q="a", o={"b": True}',
                'q="a",',
                "q='a'b'",
                "q='a\n'",
                "q='', x=1",
                "q='', q=''",
                "q='', p=[1, True, 1]",
                "q='', p=[True]",
                'q="", w="c"',
            ],
        ),
        (
            "gemma_arguments",
            [
                'q:<|"|>a "b"\n<|"|>',
                'l:[<|"|>a<|"|>],n:3,q:<|"|><|"|>',
                'o:{a:<|"|>it\'s<|"|>,b:true},q:<|"|><|<|"|>',
                'o:{a:None},q:<|"|>a<|"|>,t:[[],[]]',
                'p:[1,false],q:<|"|>a<|"|>,w:<|"|>ab<|"|>',
            ],
            [
                "",
                'q:"a"',
                'q:<|"|>a<|"|>,n:3',
                'n:3, q:<|"|>a<|"|>',
                'o:{a:<|"|>y<|"|>},q:<|"|>a<|"|>',
                'q:<|"|>a<|"|>,w:<|"|>c<|"|>',
                'q:<|"|>a<|"|>,x:1',
            ],
        ),
    ],
)
def test_a_schema_is_enforced_in_every_notation(style: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(style, SCHEMA, text)] == []
    assert [text for text in bad if accepts(style, SCHEMA, text)] == []


def test_names_that_are_not_listed_obey_the_rest_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert [
        text for text in ("", "a='x'", "a='x', b=1, c=2", "b=1") if not accepts("python_arguments", schema, text)
    ] == []
    assert [text for text in ("a=1", "b='x'", "a='x', a=1") if accepts("python_arguments", schema, text)] == []
    named = {
        "type": "object",
        "patternProperties": {"^[ab]+$": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
    }
    assert [text for text in ("a:1,c:null,bb:2", "") if not accepts("gemma_arguments", named, text)] == []
    assert [text for text in ("a:null", "c:1") if accepts("gemma_arguments", named, text)] == []
    nested = {"type": "object", "properties": {"o": schema}}
    assert accepts("python_arguments", nested, "o={'a': 'x', 'b': 1}")
    assert not accepts("python_arguments", nested, "o={'a': 1}")


@pytest.mark.parametrize(
    ("style", "schema", "message"),
    [
        ("python_arguments", {"type": "object", "properties": {"a b": {}}}, "the property name 'a b'"),
        ("python_arguments", {"type": "object", "minProperties": 1}, "minProperties"),
        ("gemma_arguments", {"type": "object", "maxProperties": 2}, "maxProperties"),
        ("gemma_arguments", {"type": "object", "properties": {"a": {"enum": ['<|"|>']}}}, "must not contain"),
        (
            "gemma_arguments",
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a", "maxLength": 3}}},
            "together cannot be enforced",
        ),
    ],
)
def test_schemas_that_a_notation_cannot_enforce_are_rejected(style: str, schema: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        accepts(style, schema, "")


def test_names_in_gemmas_form_are_sorted_whatever_their_case() -> None:
    assert NOTATIONS["gemma_arguments"].spelled({"b": 1, "C": 2, "A": {"y": 3, "X": 4}}) == "A:{X:4,y:3},b:1,C:2"
    assert NOTATIONS["python_arguments"].spelled({"b": 1, "A": 2}) == "b=1, A=2"


LIMITED = {
    "type": "object",
    "properties": {
        "i": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "maxItems": 1},
        "s": {"type": "string", "minLength": 2, "maxLength": 3},
    },
}


@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
        ("python_arguments", ["i=[1]", 's="ab"', 's="abc"'], ["i=[1, True]", 's="a"', 's="abcd"']),
        ("gemma_arguments", ["i:[1]", 's:<|"|>ab<|"|>', 's:<|"|>abc<|"|>'],
         ["i:[1,true]", 's:<|"|>a<|"|>', 's:<|"|>abcd<|"|>']),
    ],
)  # fmt: skip
def test_limits_of_items_and_texts_are_enforced_in_every_notation(style: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(style, LIMITED, text)] == []
    assert [text for text in bad if accepts(style, LIMITED, text)] == []


def test_a_name_that_matches_any_of_the_patterns_is_none_of_the_other_names() -> None:
    patterns = {"^a": {"type": "integer"}, "^b": {"type": "integer"}}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": {"type": "null"}}
    good = ["a:1", "b:1", "c:null"]
    assert [text for text in good if not accepts("gemma_arguments", schema, text)] == []
    assert [text for text in ("a:null", "b:null", "c:1") if accepts("gemma_arguments", schema, text)] == []
