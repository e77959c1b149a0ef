"""Tool call formats: detection from chat templates, structural tags, and incremental parsing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.servers.openai.tool_call_format import FORMATS, TaggedCallParser, ToolCallFormat, detect_format

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
def test_the_format_is_detected_from_the_template(templates: dict[str, str], expected: ToolCallFormat | None) -> None:
    assert detect_format(templates) is expected


@pytest.mark.parametrize("form", FORMATS)
def test_the_structural_tag_can_be_enforced(form: ToolCallFormat) -> None:
    functions = {"get": {"type": "object"}, "get_all": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for parallel in (True, False):
        asked = StructuredOutputs(structural_tag=form.structural_tag(functions, parallel=parallel))
        held = json.loads(read(asked)[0].text)
        assert [tag["begin"] for tag in held["tags"]] == [form.begin_of("get"), form.begin_of("get_all")]
        assert held["stop_after_first"] is not (parallel and form.parallel)


PARTS = st.lists(
    st.one_of(
        st.text('a<t{\n "name:é', max_size=9),
        st.tuples(st.sampled_from(["f", "f_g"]), st.sampled_from([{}, {"a": 1}, ARGUMENTS])),
    ),
    max_size=5,
)


@given(form=st.sampled_from(FORMATS), parts=PARTS, sizes=st.lists(st.integers(1, 9), min_size=1))
def test_text_and_calls_are_separated_for_any_split(form: ToolCallFormat, parts: list[Any], sizes: list[int]) -> None:
    parts_text = [p if isinstance(p, str) else form.begin_of(p[0]) + json.dumps(p[1]) + form.end for p in parts]
    texts = [part for part in parts if isinstance(part, str)]
    answer = "".join(parts_text)
    if sum(map(answer.count, [form.trigger])) > sum(
        each.count(form.trigger) for each in parts_text if each not in texts
    ):
        return  # such a text would have been a call

    reader, text, calls = TaggedCallParser(form, ["f", "f_g"]), "", list[list[str]]()
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
    reader = TaggedCallParser(HERMES, ["f"])
    assert [*reader.feed('so: <tool_call>\n{"name": "')] == ["so: "]
    assert reader.finish() == ""


@pytest.mark.parametrize("form", FORMATS)
def test_the_end_of_an_answer_releases_every_beginning_of_the_trigger_and_no_more(form: ToolCallFormat) -> None:
    """Text that could have become a call is text at the end; from the whole trigger on it is half a call."""
    begin = form.begin_of("f")
    for size in range(1, len(begin)):
        reader = TaggedCallParser(form, ["f"])
        released = "".join(each for each in reader.feed("so" + begin[:size]) if isinstance(each, str))
        assert released == "so"
        assert reader.finish() == (begin[:size] if size < len(form.trigger) else "")


@pytest.mark.parametrize("form", FORMATS)
def test_text_after_the_last_call_is_released_at_the_end(form: ToolCallFormat) -> None:
    reader, call = TaggedCallParser(form, ["f"]), form.begin_of("f") + "{}" + form.end
    steps = [*reader.feed(call + call + " so" + form.trigger[:1])]
    assert steps == [(0, "f", ""), (0, None, "{}"), (1, "f", ""), (1, None, "{}"), " so"]
    assert reader.finish() == form.trigger[:1]
