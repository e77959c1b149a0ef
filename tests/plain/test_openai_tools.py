"""Tool calling: the constraint allows exactly the calls that the functions allow, and calls are parsed in order."""

from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.openai.protocol import Function, NamedToolChoice, Tool
from tandemrt.runtime.servers.openai.tools import MAX_TOOLS, ToolCallDelta, ToolCallParser, ToolCallSpec, parse_tools
from tests.plain.tool_call_templates import HERMES, TEMPLATES, begin_of

NOT_A_REFERENCE = {"$ref": "#/$defs/text"}  # where a value is expected
OBJECT: dict[str, Any] = {"type": "object"}
REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "$ref": {"$ref": "#/$defs/text"},
        "enum": {"$ref": "#/$defs/text"},
        "one": {"enum": [NOT_A_REFERENCE, 1]},
        "fixed": {"const": NOT_A_REFERENCE},
        "described": {"default": NOT_A_REFERENCE, "examples": [NOT_A_REFERENCE], "$ref": "#/$defs/text"},
        "either": {"anyOf": [{"$ref": "#/$defs/text"}, {"items": {"$ref": "#/$defs/text"}, "type": "array"}]},
        "self": {"$ref": "#"},
        "title": {"type": "string"},
    },
    "patternProperties": {"^p": {"$ref": "#/$defs/text"}},
    "additionalProperties": False,
    "$defs": {"text": {"type": "string"}},
}
OTHER = {
    "type": "object",
    "properties": {"title": {"$ref": "#/$defs/text"}},
    "required": ["title"],
    "$defs": {"text": {"type": "integer"}},  # the same name, another schema
}


def functions(*schemas: dict[str, Any] | None) -> list[Function]:
    return [Function(name=f"f{at}", parameters=schema) for at, schema in enumerate(schemas)]


def list_of_calls(spec: ToolCallSpec) -> tuple[str, dict[str, Any], str]:
    """The structural tag of a list: the text before the calls, the calls, and the text after them."""
    tag = spec.constraint().structural_tag
    assert isinstance(tag, dict)
    before, calls, after = tag["format"]["elements"]
    return before["value"], calls, after["value"]


def test_every_call_of_a_list_has_the_schema_of_its_function() -> None:
    before, calls, after = list_of_calls(ToolCallSpec(functions(OBJECT, REFERRING, OTHER)))
    assert (before, after, calls["separator"], calls["at_least_one"]) == ("[", "]", ", ", True)
    contents = [(each["begin"], each["content"]["json_schema"], each["end"]) for each in calls["tags"]]
    assert contents == [
        ('{"name": "f0", "arguments": ', OBJECT, "}"),
        ('{"name": "f1", "arguments": ', REFERRING, "}"),
        ('{"name": "f2", "arguments": ', OTHER, "}"),
    ]


def test_required_calls_and_a_named_function_constrain_arguments_alike() -> None:
    calls = list_of_calls(ToolCallSpec(functions(OTHER)))[1]
    named_tag = ToolCallSpec(functions(OTHER), named="f0", parallel=False).constraint().structural_tag
    assert isinstance(named_tag, dict)
    arguments = {"type": "json_schema", "json_schema": OTHER}
    assert named_tag["format"] == calls["tags"][0]["content"] == arguments


@pytest.mark.parametrize("parallel", [True, False])
def test_a_list_has_several_calls_only_if_parallel(parallel: bool) -> None:
    calls = list_of_calls(ToolCallSpec(functions(OBJECT), parallel=parallel))[1]
    assert calls["stop_after_first"] is not parallel


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        (None, NOTHING | {"additionalProperties": False}),
        ({}, NOTHING | {"additionalProperties": False}),
        (NOTHING, NOTHING | {"additionalProperties": False}),
        (NOTHING | {"required": [], "title": "None"}, None),
        ({"type": "object"}, {"type": "object"}),
        (NOTHING | {"additionalProperties": True}, NOTHING | {"additionalProperties": True}),
        (NOTHING | {"patternProperties": {"a": {}}}, NOTHING | {"patternProperties": {"a": {}}}),
        (NOTHING | {"anyOf": [{"required": ["a"]}]}, NOTHING | {"anyOf": [{"required": ["a"]}]}),
    ],
)
def test_a_function_without_parameters_takes_only_an_empty_object(parameters: Any, allowed: Any) -> None:
    [call] = list_of_calls(ToolCallSpec(functions(parameters)))[1]["tags"]
    assert call["content"]["json_schema"] == (allowed or {**parameters, "additionalProperties": False})


@pytest.mark.parametrize("kind", ["string", ["object"], None])
@pytest.mark.parametrize("at", [0, 1])
def test_parameters_of_another_type_are_rejected_for_every_function(kind: Any, at: int) -> None:
    schemas = [OBJECT, OBJECT]
    schemas[at] = {"type": kind}
    for form in (None, HERMES):
        with pytest.raises(BadRequest, match=f"tools: the parameters of 'f{at}' must be a schema of type object"):
            ToolCallSpec(functions(*schemas), format=form).constraint()


SHOWN = {"default": TEMPLATES["hermes"]}


def tools(*names: str) -> list[Tool]:
    return [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in names]


def named(name: str) -> NamedToolChoice:
    return NamedToolChoice.model_validate({"type": "function", "function": {"name": name}})


DESCRIBED = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("choice", "described", "callable_names", "only", "form"),
    [
        (None, DESCRIBED, ["a", "b"], None, HERMES),
        ("auto", DESCRIBED, ["a", "b"], None, HERMES),
        ("required", DESCRIBED, ["a", "b"], None, None),
        (named("a"), DESCRIBED, ["a"], "a", None),
        (named("b"), DESCRIBED, ["b"], "b", None),
    ],
)
def test_a_choice_decides_the_functions_and_the_format(
    choice: Any, described: Any, callable_names: list[str], only: str | None, form: Any, parallel: bool
) -> None:
    parsed = parse_tools(tools("a", "b"), choice, SHOWN, parallel=parallel)
    assert list(parsed.template_tools) == described
    assert parsed.calls is not None
    assert [each.name for each in parsed.calls.functions] == callable_names
    assert (parsed.calls.named, parsed.calls.format) == (only, form)
    if only is None:
        assert parsed.calls.parallel is parallel


@pytest.mark.parametrize("choice", ["none", None, "auto", "required"])
@pytest.mark.parametrize("offered", [None, []])
def test_without_tools_or_with_none_the_model_sees_no_tools(choice: Any, offered: Any) -> None:
    nothing = parse_tools(tools("a", "b"), "none", SHOWN, parallel=True)
    assert (list(nothing.template_tools), nothing.calls) == ([], None)
    if choice == "required":
        with pytest.raises(BadRequest, match="tool_choice: must come with tools, received 'required'"):
            parse_tools(offered, choice, SHOWN, parallel=True)
    else:
        assert parse_tools(offered, choice, SHOWN, parallel=True) == nothing


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_request_has_at_most_max_tools(extra: int) -> None:
    many = tools(*(f"f{at}" for at in range(MAX_TOOLS + extra)))
    if extra > 0:
        with pytest.raises(BadRequest, match=f"tools: at most {MAX_TOOLS}, received {MAX_TOOLS + 1}"):
            parse_tools(many, "required", {}, parallel=True)
    else:
        calls = parse_tools(many, "required", {}, parallel=True).calls
        assert calls is not None
        assert [each.name for each in calls.functions] == [each.function.name for each in many]


@pytest.mark.parametrize("names", [("a", "a"), ("b", "a", "a"), ("a", "b", "a")])
@pytest.mark.parametrize("choice", ["none", "required"])
def test_two_functions_of_one_name_are_rejected_wherever_they_are(names: tuple[str, ...], choice: Any) -> None:
    with pytest.raises(BadRequest, match="tools: every function must have a name of its own, received 'a' twice"):
        parse_tools(tools(*names), choice, {}, parallel=True)


ANSWERS = {
    "named": (ToolCallSpec(functions(OBJECT), named="f0"), '{"a": 1}', [("f0", '{"a": 1}')]),
    "list": (
        ToolCallSpec(functions(OBJECT, OBJECT)),
        '[{"name": "f1", "arguments": {"a": [1]}}, {"name": "f0", "arguments": {}}, {"name": "f1", "arguments": {}}]',
        [("f1", '{"a": [1]}'), ("f0", "{}"), ("f1", "{}")],
    ),
    "format": (
        ToolCallSpec(functions(OBJECT, OBJECT), format=HERMES),
        f'{begin_of(HERMES, "f1")}{{"a": 1}}{HERMES.last}{begin_of(HERMES, "f0")}{{}}{HERMES.last}',
        [("f1", '{"a": 1}'), ("f0", "{}")],
    ),
}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("kind", ANSWERS)
def test_deltas_join_to_the_calls_in_order(kind: str, size: int) -> None:
    """The id and the name come with the first delta of each call, and ``calls`` keeps both."""
    spec, answer, expected = ANSWERS[kind]
    parser, calls, begun = ToolCallParser(spec), list[list[str]](), list[str]()
    for at in range(0, len(answer), size):
        for delta in parser.feed(answer[at : at + size], last=False):
            assert isinstance(delta, ToolCallDelta)
            assert (delta.id is None) == (delta.name is None)
            if delta.name is not None and delta.id is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
                begun.append(delta.id)
            calls[delta.index][1] += delta.arguments
    assert parser.feed("", last=True) == []
    assert [tuple(each) for each in calls] == expected
    assert [(each.name, each.arguments) for each in parser.calls] == expected
    assert [each.index for each in parser.calls] == list(range(len(expected)))
    assert [each.id for each in parser.calls] == begun
    assert len(set(begun)) == len(begun)
