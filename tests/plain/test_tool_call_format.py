"""Tool call formats: what a template writes is recognised, enforced and parsed back, however the text is split."""

import json
import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.chat_template import ChatTemplate
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.default_reasoning import reasoning_lines
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.servers.openai.tool_call_format import ToolCallFormat
from tandemrt.runtime.servers.openai.tool_call_parser import TaggedCallParser
from tandemrt.runtime.servers.openai.tool_call_probe import detect_format
from tests.plain.constraints import SPECIAL, STOP, VOCABULARY, WIDTH, byte_tokens, compiler, joined_spans
from tests.plain.tool_call_templates import HERMES, LLAMA, TEMPLATES, UNKNOWN, begin_of, format_of

FORMATS = (HERMES, LLAMA)
ARGUMENTS: dict[str, Any] = {"a": ['x"}]', {"b": "</tool_call> <tool_call>\\"}], "c": {}}
PARAMETERS: dict[str, Any] = {
    "get": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"$ref": "#/$defs/count"},
            "lines": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer"}},
    },
    "get_all": {
        "type": "object",
        "properties": {"kind": {"enum": ["a b", "(c)"]}, "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get", {"query": 'a <b> "c"\né', "count": -3, "lines": ["</parameter>", "</arg_value>"]}),
    ("get_all", {"kind": "(c)", "unit": "x"}),
    ("get", {"query": ""}),
]
DESCRIBED = ("granite 3", "lfm 2", "harmony")  # templates that leave earlier calls out, or write them differently
SHOWN = [name for name in TEMPLATES if name not in DESCRIBED]


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The answer with ``calls`` as the template ``name`` writes it."""
    kimi = format_of(name).named_ids
    listed = [
        {
            "id": f"functions.{function}:{at}" if kimi else f"a2B4c6D8{at}",
            "type": "function",
            "function": {"name": "" if kimi else function, "arguments": arguments},
        }
        for at, (function, arguments) in enumerate(calls)
    ]
    template = ChatTemplate(TEMPLATES[name], {})
    text = template.render(template.values([{"role": "assistant", "content": "", "tool_calls": listed}]))
    return text.removeprefix("<|im_start|>assistant\n").rpartition("<|im_end|>")[0].strip()


def several(form: ToolCallFormat) -> bool:
    return form.groups or form.between is not None


def accepts(form: ToolCallFormat, text: str, parameters: Any = PARAMETERS, *, parallel: bool = True) -> bool:
    asked = StructuredOutputs(structural_tag=form.structural_tag(parameters, parallel=parallel))
    matcher = compiler().compile("structural_tag", read(asked)[0].text).matcher()
    return all(map(matcher.accept, byte_tokens(text))) and matcher.accept(STOP)


def parsed(form: ToolCallFormat, text: str, size: int, parameters: Any = PARAMETERS) -> tuple[str, list[list[str]]]:
    """The text and the calls that the parser finds in pieces of ``size`` characters."""
    reader, content, calls = TaggedCallParser(form, parameters), "", list[list[str]]()
    for at in range(0, len(text), size):
        for step in reader.feed(text[at : at + size]):
            if isinstance(step, str):
                content += step
            elif step[1] is not None:
                assert step[0] == len(calls)
                calls.append([step[1], step[2]])
            else:
                calls[step[0]][1] += step[2]
    return content + reader.finish(), calls


@pytest.mark.parametrize("name", SHOWN)
def test_calls_that_a_template_writes_are_accepted_and_parsed_back(name: str) -> None:
    form = format_of(name)
    calls = CALLS if several(form) else CALLS[:1]
    text = written(name, calls)
    assert accepts(form, f"so: {text}")
    for size in (1, 3, len(text)):
        content, parsed_calls = parsed(form, f"so: {text}", size)
        assert content.strip() == "so:"
        assert [(function, json.loads(arguments)) for function, arguments in parsed_calls] == calls


IN_TAGS = [name for name in TEMPLATES if format_of(name).fields is not None]


def parts_of(form: ToolCallFormat) -> tuple[str, list[str]]:
    """The end of an argument, and the texts that may follow it."""
    assert form.fields is not None
    return form.fields.after, form.after_field


def first_of(words: list[str], text: str) -> int:
    return min(at for word in words if (at := text.find(word)) >= 0)


@settings(deadline=None)
@given(name=st.sampled_from(IN_TAGS), data=st.data(), size=st.sampled_from([1, 3, 1000]))
def test_an_argument_in_tags_may_contain_its_end(name: str, data: st.DataObject, size: int) -> None:
    """It ends where the next argument or the end of the call follows, so it may contain all but that."""
    form = format_of(name)
    end, following = parts_of(form)
    pieces = st.sampled_from([end, end.strip(), end[:-1], *following, *(text[:-1] for text in following), "\n", "a"])
    value = "".join(data.draw(st.lists(pieces, max_size=6)))
    ends = [each + text for each in (end, end.lstrip()) for text in following]
    assume(all(first_of(ends, value + end + text) == len(value) for text in following))
    calls = [
        ("get_all", {"kind": "(c)", "unit": value}),
        ("get", {"query": value, "count": 1}),
        ("get", {"query": value}),
    ]
    text = written(name, calls)
    assert accepts(form, text)
    content, parsed_calls = parsed(form, text, size)
    assert content.strip() == ""
    assert [(function, json.loads(arguments)) for function, arguments in parsed_calls] == calls


@pytest.mark.parametrize("name", IN_TAGS)
def test_an_argument_in_tags_ends_where_another_argument_begins_or_the_call_ends(name: str) -> None:
    form = format_of(name)
    end, (begin, last, *_) = parts_of(form)
    assert not accepts(form, written(name, [("get", {"query": f"a{end}{begin}b"})]))
    _, [[_, arguments]] = parsed(form, written(name, [("get", {"query": f"a{end}{last}b"})]), 1)
    assert json.loads(arguments) == {"query": "a"}


@pytest.mark.parametrize("name", ["qwen coder", "qwen coder with line breaks"])
@pytest.mark.parametrize("query", ["", "a", "a\n", " a </parameter> b", "</parameter"])
def test_a_text_ends_without_the_line_break_that_the_template_writes(name: str, query: str) -> None:
    """Qwen3.6 forgets it at times. The rest of the answer is no part of the argument then."""
    form, calls = format_of(name), [("get", {"query": query, "count": 1}), ("get", {"query": query})]
    text = written(name, calls).replace(f"query>\n{query}\n", f"query>\n{query}")
    kept = [("get", {**arguments, "query": query.removesuffix("\n")}) for _, arguments in calls]
    assert accepts(form, text)
    for size in (1, 3, 1000):
        content, read_calls = parsed(form, text, size)
        assert (content.strip(), [(each, json.loads(arguments)) for each, arguments in read_calls]) == ("", kept)


HARMONY = "commentary to=functions.get <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite 3", '<|tool_call|>[{"name": "get", "arguments": {}}]'),
        ("lfm 2", "<|tool_call_start|>[get({})]<|tool_call_end|>"),
        ("harmony", f"<|channel|>{HARMONY}"),
        ("harmony", f"<|end|><|start|>assistant<|channel|>{HARMONY}"),
        ("harmony", "<|end|><|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}"),
    ],
)
def test_a_model_writes_the_calls_that_its_prompt_describes(name: str, text: str) -> None:
    form = format_of(name)
    arguments, expected = ("query='a'", '{"query": "a"}') if name == "lfm 2" else ('{"query": "a"}', '{"query": "a"}')
    for size in (1, 2, 100):
        assert parsed(form, "so" + text.replace("{}", arguments), size) == ("so", [["get", expected]])
    assert accepts(form, "so" + text.replace("{}", arguments))
    assert not accepts(form, text.replace("{}", arguments.replace("query", "count")))
    assert not accepts(form, text.replace("get", "set").replace("{}", arguments))


@pytest.mark.parametrize("name", SHOWN)
def test_only_calls_that_obey_the_functions_are_accepted(name: str) -> None:
    form = format_of(name)
    wrong = [
        ("get", {"count": 1}),
        ("get", {"query": "a", "count": "many"}),
        ("get", {"query": "a", "lines": [1]}),
        ("get", {"query": "a", "other": 1}),
        ("get_all", {"kind": "c"}),
        ("set", {"query": "a"}),
        ("get_", {"query": "a"}),
    ]
    accepted = [call for call in wrong if accepts(form, written(name, [call]))]
    assert accepted == (wrong[-2:] if name == "pythonic" else [])  # there the names decide: those two are text
    assert [parsed(form, written(name, [call]), 1)[1] for call in accepted] == [[] for _ in accepted]
    begun = written(name, CALLS[:1])
    assert not accepts(form, begun[:-5] if form.last else begun[:-1])


@pytest.mark.parametrize("name", SHOWN)
def test_several_calls_need_parallel(name: str) -> None:
    form = format_of(name)
    if several(form):
        assert not accepts(form, written(name, CALLS[:2]), parallel=False)
    assert accepts(form, written(name, CALLS[:1]), parallel=False)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_template_without_a_known_format_has_none(name: str) -> None:
    assert detect_format({"default": UNKNOWN[name]}) is None


def test_the_template_for_tools_decides() -> None:
    assert detect_format({"default": UNKNOWN["plain"], "tool_use": TEMPLATES["hermes"]}) == HERMES
    assert detect_format({"default": TEMPLATES["hermes"], "tool_use": UNKNOWN["plain"]}) is None
    assert detect_format({}) is None


def test_a_template_that_runs_long_has_no_format() -> None:
    slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    assert detect_format({"default": slow + TEMPLATES["hermes"]}) is None


def one(schema: Any, **more: Any) -> dict[str, Any]:
    return {"f": {"type": "object", "properties": {"p": schema}, "required": ["p"], **more}}


WITHOUT_BREAK = "</parameter>\n</function>\n</tool_call>"
COLOR = {"type": "string", "enum": ["red", "blue"]}
CODER = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "1", "null", 'a "b"', "a\n\nb", "</parameter"], []),
        ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
        ({"type": "string", "maxLength": 0}, [""], ["a"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["é", "ab"], ["", "abc"]),
        ({"type": "string", "pattern": "^[ab]+$"}, ["ab"], ["", "c", "abc"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "today"]),
        ({"type": "string", "format": "an unknown one"}, ["a"], []),
        ({"const": "a.b"}, ["a.b"], ["axb"]),
        ({"type": "string", "enum": ["a", "ab"]}, ["a", "ab"], ["b", ""]),
        ({"enum": [1, None]}, ["1", "null"], ["2"]),
        ({"enum": [f"zone/{number}" for number in range(420)]}, ["zone/0", "zone/419"], ["zone/420", "zone/"]),
        ({"type": "boolean", "description": "so"}, ["true"], ["yes"]),
        ({"type": ["string", "null"]}, ["a", "null"], []),
        ({"type": "array", "items": {"enum": [1]}}, ["[1, 1]", "[]"], ["[2]", "1"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ["a"]),
        ({"type": "string", "pattern": r"\p{Lu}[^\p{L}]$"}, ["aB1"], ["aBc", "ab1"]),
        ({"type": "string", "pattern": "^a|b"}, ["a", "ac", "cb"], ["ca", ""]),
        ({"type": "string", "minLength": 1, "pattern": "^a*$"}, ["a", ""], ["b"]),
        ({"type": "string", "maxLength": 10**6}, ["", "a" * 2000], []),
        ({"type": "string", "minLength": 2, "maxLength": 10**6}, ["ab"], ["a"]),
        ({"type": "string", "format": "uri-template"}, ["{x}"], []),
        ({"type": ["string", "integer"]}, ["a", "1"], []),
        ({}, ["a", "1", "[1]"], []),
        ({"enum": ["a", 1, None, [True]]}, ["a", "1", "null", "[true]"], ["2", "b", ""]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a", '["a"]'], []),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, ["a", "null"], []),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string"}]}, ["abcd"], []),
        ({"anyOf": [COLOR, {"type": "null"}], "default": None}, ["red", "null"], ["green", '"red"', ""]),
        ({"anyOf": [COLOR, {"const": "none"}]}, ["red", "none"], ["green", '"red"']),
        ({"anyOf": [{"anyOf": [COLOR, {"enum": [1]}]}, {"type": "boolean"}]}, ["red", "2", "true"], []),
        ({"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", "c"]}, {"const": "c"}]}, ["a", "b"], ["c", "d"]),
        ({"type": "string", "anyOf": [COLOR, {"const": 1}]}, ["red"], ["1", "green"]),
        ({"oneOf": [{"const": 1}, {"const": 1.0}, {"enum": ["a", "a"]}]}, ["a"], ["1", "1.0"]),
        ({"anyOf": [COLOR, {"type": "string"}]}, ["red", "green"], []),
        ({"allOf": [COLOR], "default": "red"}, ["red"], ["green"]),
        ({"allOf": [COLOR, {"description": "so"}]}, ["red"], ["green"]),
        ({"allOf": [{"type": "object", "properties": {"a": {}}}, {"minProperties": 1}]}, ['{"a": 1}'], ["a", "{}"]),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, ["null"], ["a", "1"]),
        ({"type": "string", "allOf": [{"minLength": 2}]}, ["ab"], []),
        ({"type": "string", "enum": ["a", None]}, ["a"], ["null"]),
        ({"type": "integer", "enum": [1.0, 2.5, "1"]}, ["1"], ["2.5", '"1"']),
        (True, ["a", "1", "[1]"], []),
    ],
)
def test_an_argument_outside_json_obeys_its_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    form, parameters = format_of("qwen coder"), one(schema)
    assert [text for text in good if not accepts(form, CODER.format(text), parameters)] == []
    assert [text for text in bad if accepts(form, CODER.format(text), parameters)] == []


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"),
        ({"type": "string"}, 'a "b"\\\n', 'a "b"\\\n'),
        ({"type": "array"}, '["\\n</parameter>", "\\""]', ["\n</parameter>", '"']),
        ({"type": "string", "maxLength": 99}, f"a{WITHOUT_BREAK}", f"a{WITHOUT_BREAK}"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": ["string", "integer"]}, "1", 1),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "NaN", "NaN"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({}, '{"a": [1, "</p"]}', {"a": [1, "</p"]}),
        ({}, '"a"', '"a"'),
        ({}, "[1", "[1"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["a", 2]}, "2", 2),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["a"]', ["a"]),
    ],
)
def test_an_argument_outside_json_becomes_its_value(schema: Any, text: str, value: Any) -> None:
    assert accepts(format_of("qwen coder"), CODER.format(text), one(schema))
    for size in (1, 2, 1000):
        content, [[name, arguments]] = parsed(format_of("qwen coder"), CODER.format(text), size, one(schema))
        assert (content, name, json.loads(arguments)) == ("", "f", {"p": value})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (one({"$ref": "#"}), "the reference '#'"),
        (one({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}), "the reference '#/\\$defs/a'"),
        (one({"type": "integer"}, minProperties=2), "the keyword 'minProperties'"),
        (one({"type": "integer"}, additionalProperties={"type": "integer"}), "not listed by name"),
        ({"f": {"type": "object", "required": ["q"]}}, "the required property 'q'"),
        ({"f": {"type": "object", "properties": {"a>b": {"type": "integer"}}}}, "the property name 'a>b'"),
        ({"f": {"type": "object", "properties": {"a": False}}}, "a property with the schema 'false'"),
        (one({"type": "integer"}, anyOf=[{"required": ["p"]}]), "the keyword 'anyOf'"),
        (one({"type": "integer"}, requird=["p"]), "the keyword 'requird'"),
        (one({"oneOf": [{"const": number} for number in range(30_000)]}), "more than 20000"),
    ],
)
def test_an_argument_that_cannot_be_enforced_outside_json_is_rejected(parameters: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=f"tools: .*{message}"):
        format_of("qwen coder").structural_tag(parameters, parallel=True)
    HERMES.structural_tag(parameters, parallel=True)


@pytest.mark.parametrize("more", [{"additionalProperties": {}}, {"x-order": 1}, {"strict": True}, {"nullable": False}])
def test_keywords_without_effect_leave_a_function_as_it_is(more: dict[str, Any]) -> None:
    assert accepts(format_of("qwen coder"), CODER.format("1"), one({"type": "integer"}, **more))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "required": None},
        {"type": "object", "properties": None},
        {"type": "object", "properties": {"p": {"enum": None}}},
        {"type": "object", "properties": {"p": {"enum": "ab"}}},
        {"type": "object", "properties": {"p": {"anyOf": {}}}},
        {"type": "object", "properties": {"p": {"allOf": []}}},
    ],
)
def test_parameters_that_are_no_json_schema_are_rejected(parameters: Any) -> None:
    for name, function in (("qwen coder", "tools: the parameters of 'f': "), ("hermes", "")):
        with pytest.raises(BadRequest, match=f"{function}not a JSON schema at #"):
            accepts(format_of(name), "", {"f": parameters})


def test_an_optional_argument_without_a_value_is_left_out() -> None:
    parameters = one({"type": "integer"})
    parameters["f"]["properties"]["never"] = {"enum": []}
    assert accepts(format_of("qwen coder"), CODER.format("1"), parameters)


def test_the_types_of_an_argument_are_read_through_16_choices() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(16):
        schema = {"anyOf": [schema]}
    assert accepts(format_of("qwen coder"), CODER.format("1"), one(schema))
    with pytest.raises(BadRequest, match="a reference to itself"):
        format_of("qwen coder").structural_tag(one({"anyOf": [schema]}), parallel=True)


@pytest.mark.parametrize("last", [{"const": "a"}, {"type": "string"}])
def test_definitions_that_choices_share_are_read_once(last: dict[str, Any]) -> None:
    shared = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 3} for at in range(16)}
    parameters = one({"$ref": "#/$defs/a0"}, **{"$defs": shared | {"a16": last}})
    assert accepts(format_of("qwen coder"), CODER.format("a"), parameters)
    with pytest.raises(BadRequest, match="a reference to itself"):
        accepts(format_of("qwen coder"), "", one({"$ref": "#/$defs/a0"}, **{"$defs": shared | {"a16": shared["a0"]}}))


@pytest.mark.parametrize("name", ["qwen coder", "glm", "minimax"])
def test_a_function_without_arguments_is_called_without_any(name: str) -> None:
    form, parameters = format_of(name), {"f": {"type": "object", "additionalProperties": True}}
    text = form.first + "f" + form.opening + form.last
    assert accepts(form, text, parameters)
    assert parsed(form, text, 1, parameters) == ("", [["f", "{}"]])


@pytest.mark.parametrize("form", FORMATS)
def test_the_structural_tag_can_be_enforced(form: ToolCallFormat) -> None:
    functions = {"get": {"type": "object"}, "get_all": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for parallel in (True, False):
        asked = StructuredOutputs(structural_tag=form.structural_tag(functions, parallel=parallel))
        tag = json.loads(read(asked)[0].text)
        assert tag["triggers"] == form.triggers(functions)
        assert tag["stop_after_first"] is not (parallel and form.groups)


PARTS = st.lists(
    st.one_of(
        st.text('a<t{\n "name:é', max_size=9),
        st.tuples(st.sampled_from(["f", "f_g"]), st.sampled_from([{}, {"a": 1}, ARGUMENTS])),
    ),
    max_size=5,
)


@given(form=st.sampled_from(FORMATS), parts=PARTS, sizes=st.lists(st.integers(1, 9), min_size=1))
def test_text_and_calls_are_separated_for_any_split(form: ToolCallFormat, parts: list[Any], sizes: list[int]) -> None:
    parts_text = [p if isinstance(p, str) else begin_of(form, p[0]) + json.dumps(p[1]) + form.last for p in parts]
    texts = [part for part in parts if isinstance(part, str)]
    answer = "".join(parts_text)
    [trigger] = form.triggers([])
    if answer.count(trigger) > sum(each.count(trigger) for each in parts_text if each not in texts):
        return  # such a text would have been a call

    reader, text, calls = TaggedCallParser(form, dict.fromkeys(["f", "f_g"])), "", list[list[str]]()
    while answer:
        size, sizes = sizes[0], sizes[1:] + sizes[:1]
        for step in reader.feed(answer[:size]):
            if isinstance(step, str):
                text += step
            elif step[1] is not None:
                assert step[0] == len(calls)
                calls.append([step[1], step[2]])
            else:
                calls[step[0]][1] += step[2]
        answer = answer[size:]
    assert text + reader.finish() == "".join(texts)
    assert calls == [[part[0], json.dumps(part[1])] for part in parts if not isinstance(part, str)]


def test_an_incomplete_call_is_not_text() -> None:
    reader = TaggedCallParser(HERMES, {"f": {}})
    assert [*reader.feed('so: <tool_call>\n{"name": "')] == ["so: "]
    assert reader.finish() == ""


@pytest.mark.parametrize("form", FORMATS)
def test_the_end_of_an_answer_releases_every_beginning_of_the_trigger_and_no_more(form: ToolCallFormat) -> None:
    """Text that could have become a call is text at the end; from the whole trigger on it is half a call."""
    begin = begin_of(form, "f")
    for size in range(1, len(begin)):
        reader = TaggedCallParser(form, {"f": {}})
        released = "".join(each for each in reader.feed("so" + begin[:size]) if isinstance(each, str))
        assert released == "so"
        assert reader.finish() == (begin[:size] if size < len(form.triggers([])[0]) else "")


@pytest.mark.parametrize("form", FORMATS)
def test_text_after_the_last_call_is_released_at_the_end(form: ToolCallFormat) -> None:
    reader, call = TaggedCallParser(form, {"f": {}}), begin_of(form, "f") + "{}" + form.last
    steps = [*reader.feed(call + call + " so" + form.first[:1])]
    assert steps == [(0, "f", ""), (0, None, "{}"), (1, "f", ""), (1, None, "{}"), " so"]
    assert reader.finish() == form.first[:1]


@pytest.mark.parametrize(
    ("name", "ids"), [("kimi", ["functions.get:0", "functions.get_all:1"]), ("mistral", [None] * 2)]
)
def test_an_id_that_the_model_writes_is_that_of_the_call(name: str, ids: list[str | None]) -> None:
    reader = TaggedCallParser(format_of(name), PARAMETERS)
    steps = [(step, reader.call_id(step[1] or "")) for step in reader.feed(written(name, CALLS[:2])) if step[1]]
    assert [call_id for _, call_id in steps] == ids


def with_control_tokens(text: str, control: dict[str, int]) -> list[int]:
    """The tokens of ``text``, in which each tag of ``control`` is its control token."""
    parts = re.split("(" + "|".join(map(re.escape, control)) + ")", text)
    return [token for part in parts for token in ([control[part]] if part in control else byte_tokens(part))]


@pytest.mark.parametrize(
    ("name", "query"),
    [*((name, "a") for name in SHOWN), *((name, f"a{parts_of(format_of(name))[0]}\nb") for name in IN_TAGS)],
)
def test_tags_may_be_control_tokens(name: str, query: str) -> None:
    form, text = format_of(name), written(name, [("get", {"query": query, "count": 1})])
    tags = dict.fromkeys(re.findall(r'<\|?/?[a-zA-Z_:"]+\|?>|\[[A-Z_]+\]', text))
    control = {tag: SPECIAL.start + at for at, tag in enumerate(tags)}
    stop = SPECIAL.start + len(control)
    vocabulary = replace(
        VOCABULARY, control=control, special=frozenset(range(SPECIAL.start, stop + 1)), valid_tokens=stop + 1
    )
    asked = StructuredOutputs(structural_tag=form.structural_tag(PARAMETERS, parallel=True))
    matcher = GrammarCompiler(vocabulary, [stop]).compile("structural_tag", read(asked)[0].text).matcher()
    assert all(map(matcher.accept, with_control_tokens(f"so: {text}", control)))
    assert matcher.accept(stop)


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("<|end|><|start|>assistant<|channel|>final<|message|>so", "so", []),
        ("<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}", "", ["get"]),
        ("<|end|><|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}", "", ["get"]),
        (
            "<|end|><|start|>assistant<|channel|>commentary<|message|>so"
            "<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}",
            "so",
            ["get"],
        ),
    ],
)
def test_a_call_of_gpt_oss_ends_its_reasoning(answer: str, text: str, calls: list[str]) -> None:
    tags = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
    control = {tag: SPECIAL.start + at for at, tag in enumerate(tags)}
    vocabulary = replace(VOCABULARY, control=control)
    [lines] = tomllib.loads(
        "\n".join(reasoning_lines(control.__contains__, "".join(tags) + "<|channel|>analysis"))
    ).values()
    ids = {
        name: with_control_tokens(value, control)
        if isinstance(value, str)
        else [with_control_tokens(each, control) for each in value]
        for name, value in lines.items()
    }
    form, stop = format_of("harmony"), SPECIAL.start + len(tags)
    asked = StructuredOutputs(structural_tag=form.structural_tag(PARAMETERS, parallel=True))
    grammar = GrammarCompiler(vocabulary, [stop]).compile("structural_tag", read(asked)[0].text).matcher()
    rule = ThinkingRule(**ids, vocabulary=vocabulary)
    state = Constraint(WIDTH, [stop], valid_tokens=vocabulary.valid_tokens, thinking=rule, grammar=grammar)

    written = "<|channel|>analysis<|message|>hm" + answer.replace("{}", '{"query": "a"}')
    tokens = with_control_tokens(written, control)
    names = {token: tag.encode() for tag, token in control.items()}
    texts: dict[str, str] = {}
    for role, spelled in joined_spans([state.commit([token]) for token in tokens] + [state.commit([stop])]):
        data = b"".join(names.get(token, b"") or vocabulary.tokens[token] for token in spelled if token != stop)
        texts[role] = texts.get(role, "") + data.decode()
    assert state.finished
    assert texts["reasoning"] == "hm"
    content, read_calls = parsed(form, texts["answer"], 3)
    assert (content, [name for name, _ in read_calls]) == (text, calls)
