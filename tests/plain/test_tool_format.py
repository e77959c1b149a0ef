"""How models write calls: seen in their chat templates, asked for as a structural tag, and read as an answer comes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars.structured import read
from tandemrt.runtime.serve.tool_format import FORMATS, TaggedReader, ToolFormat, format_of

HERMES, LLAMA = FORMATS
QWEN3 = """return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>"""
LLAMA31 = """Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}."""
CODER = QWEN3 + "<function=example_function_name>"
ARGUMENTS: dict[str, Any] = {"a": ['x"}]', {"b": "</tool_call> <tool_call>\\"}], "c": {}}


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({"default": QWEN3}, HERMES),
        ({"default": LLAMA31}, LLAMA),
        ({"default": "plain", "tool_use": QWEN3}, HERMES),
        ({"default": CODER}, None),
        ({"default": "{{ messages }}"}, None),
        ({}, None),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(templates: dict[str, str], expected: ToolFormat | None) -> None:
    assert format_of(templates) is expected


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_asked_for_is_a_structural_tag_that_can_be_held(form: ToolFormat) -> None:
    functions = {"get": {"type": "object"}, "get_all": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for parallel in (True, False):
        asked = StructuredOutputs(structural_tag=form.structural_tag(functions, parallel=parallel))
        held = json.loads(read(asked)[0].text)
        assert [tag["begin"] for tag in held["tags"]] == [form.begins("get"), form.begins("get_all")]
        assert held["stop_after_first"] is not (parallel and form.several)


PARTS = st.lists(
    st.one_of(
        st.text('a<t{\n "name:é', max_size=9),
        st.tuples(st.sampled_from(["f", "f_g"]), st.sampled_from([{}, {"a": 1}, ARGUMENTS])),
    ),
    max_size=5,
)


@given(form=st.sampled_from(FORMATS), parts=PARTS, sizes=st.lists(st.integers(1, 9), min_size=1))
def test_text_and_calls_are_told_apart_however_they_come(form: ToolFormat, parts: list[Any], sizes: list[int]) -> None:
    spelled = [p if isinstance(p, str) else form.begins(p[0]) + json.dumps(p[1]) + form.end for p in parts]
    texts = [part for part in parts if isinstance(part, str)]
    answer = "".join(spelled)
    if sum(map(answer.count, [form.trigger])) > sum(each.count(form.trigger) for each in spelled if each not in texts):
        return  # such a text would have been a call

    reader, text, calls = TaggedReader(form, ["f", "f_g"]), "", list[list[str]]()
    while answer:
        size, sizes = sizes[0], sizes[1:] + sizes[:1]
        for step in reader.read(answer[:size]):
            if isinstance(step, str):
                text += step
            elif step[1] is not None:
                assert step[0] == len(calls)
                calls.append([step[1], step[2]])
            else:
                calls[step[0]][1] += step[2]
        answer = answer[size:]
    assert text + reader.end() == "".join(texts)
    assert calls == [[part[0], json.dumps(part[1])] for part in parts if not isinstance(part, str)]


def test_a_call_that_was_cut_off_is_no_text() -> None:
    reader = TaggedReader(HERMES, ["f"])
    assert [*reader.read('so: <tool_call>\n{"name": "')] == ["so: "]
    assert reader.end() == ""
