"""Incremental parser of tool calls in a JSON list."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.servers.openai.json_calls import JsonCallParser

TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(['"', "\\", '\\"', "[{", "}]", ',"'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True), st.dictionaries(TEXT, JSON)), max_size=4
)


@given(CALLS, st.booleans(), st.randoms(use_true_random=False))
def test_calls_do_not_depend_on_how_the_text_is_split(calls: Any, spaced: bool, draw: Any) -> None:
    separators = (" , ", " :\n ") if spaced else (",", ":")
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], separators=separators)
    expected = [(name, json.dumps(arguments, separators=separators)) for name, arguments in calls]
    reader, parsed_calls = JsonCallParser(), []
    rest = text
    while rest:
        size = draw.randint(1, 6)
        for index, name, arguments in reader.feed(rest[:size]):
            if name is not None:
                assert index == len(parsed_calls)
                parsed_calls.append((name, ""))
            parsed_calls[index] = (parsed_calls[index][0], parsed_calls[index][1] + arguments)
        rest = rest[size:]
    assert parsed_calls == expected
