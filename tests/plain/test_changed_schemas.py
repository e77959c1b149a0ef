"""What a schema, a changed schema, a regex and tool calls become for the engine of grammars, equal to the recorded."""

import random
from typing import Any

import pytest

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.formats import PATTERNS
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.llguidance_compiler import LLGuidanceCompiler
from tandemrt.runtime.grammars.regex import json_string, patterns
from tandemrt.runtime.grammars.regex.complement import complement, complement_size
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.sources import read
from tests.plain.constraints import compiler
from tests.plain.drawing import write
from tests.plain.test_tool_call_format import PARAMETERS
from tests.plain.tool_call_templates import TEMPLATES, UNKNOWN, format_of
from tests.recorded import changes, require_recorded

TEXT: dict[str, Any] = {"type": "string"}
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(20):
    DEEP = {"type": "array", "items": DEEP, "maxItems": 1}
SCHEMAS: dict[str, dict[str, Any]] = {
    "deep": {"$defs": {"d": DEEP}, "prefixItems": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/d"}], "type": "array"},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -3, "maximum": 120}, "b": TEXT, "c": {"type": "boolean"}},
        "required": ["b", "a"],
        "additionalProperties": {"type": "null"},
        "minProperties": 2,
        "maxProperties": 4,
    },
    "names": {
        "type": "object",
        "patternProperties": {"^x-": {"type": "number"}, "y$": TEXT},
        "propertyNames": {"pattern": "^[a-z-]+$", "maxLength": 5},
        "dependentRequired": {"x-a": ["x-b"]},
        "dependentSchemas": {"x-b": {"required": ["x-c"]}},
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "prefixItems": [{"const": 1}, TEXT],
        "items": {"type": ["integer", "null"]},
        "minItems": 1,
        "maxItems": 4,
        "contains": {"const": 1},
        "minContains": 1,
    },
    "unique": {"type": "array", "items": {"enum": [1, "a", None, [2], {"b": 3}]}, "uniqueItems": True, "minItems": 2},
    "unique, unlisted": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 5},
    "numbers": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 1000.25, "multipleOf": 0.25},
    "integers": {"type": "integer", "minimum": 7, "exclusiveMaximum": 1234, "multipleOf": 6},
    "strings": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-c\\d]+(x|yz)?"},
    "formats": {"anyOf": [{"type": "string", "format": name} for name in sorted(PATTERNS)]},
    "all": {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"$ref": "#/$defs/b"}], "$defs": {
        "b": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}}},
    "any": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "array", "items": TEXT}]},
    "one": {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}, {"const": "a"}]},
    "not": {"type": ["integer", "string"], "not": {"anyOf": [{"const": "ab"}, {"minimum": 5}, {"pattern": "^c"}]}},
    "if": {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "v": {}}, "required": ["k", "v"],
           "if": {"properties": {"k": {"const": "a"}}}, "then": {"properties": {"v": {"type": "integer"}}},
           "else": {"properties": {"v": TEXT}}},
    "unevaluated": {"type": "object", "allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": {"type": "null"}}}],
                    "unevaluatedProperties": False, "required": ["a"]},
    "unevaluated items": {"type": "array", "prefixItems": [TEXT], "anyOf": [{"prefixItems": [True, {"const": 2}]}],
                          "unevaluatedItems": {"type": "null"}, "maxItems": 4},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["v"], "properties": {
        "v": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}, "more": {"type": "array", "items": {
            "$ref": "#/$defs/tree"}}}, "additionalProperties": False}}},
    "dynamic": {"$id": "http://x/root", "$anchor": "top", "type": "object", "properties": {"p": {
        "$id": "/sub", "$defs": {"q": {"$anchor": "q", "type": "integer"}}, "$ref": "#q"}, "r": {
        "$ref": "http://x/root#top"}}},
    "drafts": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "definitions": {"a": {
        "type": "integer", "minimum": 1, "exclusiveMinimum": True}}, "properties": {"a": {"$ref": "#/definitions/a"}},
        "additionalItems": False, "dependencies": {"a": ["b"]}},
    "enums": {"enum": [0, -0.5, 1e3, "é\n\"", "\u2028", [], {"a": [None]}, True]},
}  # fmt: skip
REGEXES = (
    "a|bc", "(?:ab)*c+d?", "a{2,3}b{2}c{1,}", "[^a-c]x", "[\\w-]+@\\w", "\\d{1,3}(\\.\\d{1,3}){3}", "(?i)abc",
    "^ab$", "\\bword\\b", "(?=a)ab", "(?!a)[a-z]", "a.b", "(?s:a.b)", "\\u00e9\\x41\\n\\t", "[\\s\\S]*",
    "\\p{L}+", "(?P<n>a)b", "(a|b)*abb", "(x+x+)+y", "", "a??b", "[]a]", "\\/", "[a-z&&b]", "(?<!a)b",
    "\\Aab\\Z", "[^\\x00-\\x7f]", "a$b", "(a",
)  # fmt: skip


class Written(Exception):
    """Instead of a compilation: the text that would be compiled."""


@pytest.fixture(autouse=True)
def no_compilation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_written(_: object, text: str) -> None:
        raise Written(text)

    if "text" not in request.node.originalname:
        monkeypatch.setattr(LLGuidanceCompiler, "_compile", raise_written)


def source_of(**structured: Any) -> str:
    """The source, the check and the grammar of a constraint, or the error."""
    try:
        source, check = read(StructuredOutputs(**structured))
        compiler().compile(source.kind, source.text, whitespace=source.whitespace)
    except Written as written:
        return f"{source} {check and check.__dict__} {written}"
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was compiled")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_changed_schema_becomes_the_same_grammar_as_before(name: str) -> None:
    schema = SCHEMAS[name]
    answers = [source_of(json=schema, whitespace=each) for each in ("compact", "any", "bounded")]
    answers.append(source_of(json=schema, validate_output=True))
    answers.append(source_of(json=schema, disable_additional_properties=False))
    answers += [f"{change}: {source_of(json=schema)}" for change in changes(schema, every=4 if len(schema) > 1 else 9)]
    require_recorded(f"schema/{name}", answers)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_texts_of_a_grammar_are_as_before(name: str) -> None:
    try:
        grammar = compiler().compile("json", read(StructuredOutputs(json=SCHEMAS[name]))[0].text, whitespace="bounded")
    except BadRequest as error:
        require_recorded(f"texts/{name}", [str(error)])
    else:
        require_recorded(f"texts/{name}", (str(write(grammar, random.Random(seed))) for seed in range(4)))


def test_a_regex_becomes_the_same_expressions_as_before() -> None:
    def tried(call: Any, *arguments: Any) -> str:
        try:
            return str(call(*arguments))
        except (UnsupportedPattern, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    answers = []
    for pattern in REGEXES:
        answers += [source_of(regex=pattern), written := tried(patterns.fullmatch_expression, pattern)]
        answers += [tried(complement, (pattern, "b+")), tried(complement_size, (pattern,))]
        if not written.startswith("Unsupported"):
            answers += [tried(json_string.string_of, written), tried(json_string.name_of, written)]
    require_recorded("regexes", answers)


@pytest.mark.parametrize("name", SHOWN := [each for each in TEMPLATES if each not in UNKNOWN])
def test_calls_of_a_template_become_the_same_grammar_as_before(name: str) -> None:
    form = format_of(name)
    some = list(SCHEMAS.values())[SHOWN.index(name) % 3 :: 3]
    shapes = [PARAMETERS, *({"f": {"type": "object", "properties": {"a": schema}}} for schema in some)]
    answers = [str(form)]
    for at, parameters in enumerate(shapes):
        try:
            answers.append(source_of(structural_tag=form.structural_tag(parameters, parallel=at > 0)))
        except BadRequest as error:
            answers.append(str(error))
    require_recorded(f"calls/{name}", answers)
