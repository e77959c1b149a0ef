"""JSON of clients: what is too much for one text, and texts that UTF-8 cannot encode."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.servers.json_text import MOST_VALUES, is_encodable, lone_surrogate, parse_json_text

PARTS = (r"\ud83d", r"\uDE00", r"\u00e9", r"\\", r"\"", r"\\ud83d", "u", "d83d", "é", "😀")

COUNTED: dict[str, Callable[[int], str]] = {
    "texts": lambda count: '["", ' + ", ".join(['"a,[{"'] * (count - 2)) + "]",
    "keys": lambda count: "{" + ",".join(f'"{key}":1' for key in range(count - 1)) + "}",
    "lists": lambda count: "[" + ",".join(["[0]"] * (count - 1)) + "]",
    "objects": lambda count: "[" + ",".join(["{}"] * (count - 1)) + "]",
    "a text with escaped quotes, then lists": lambda count: '["' + r"\"[" * 70_000 + '"' + ",[]" * (count - 2) + "]",
    "lists, then a text": lambda count: "[0" + ",[]" * (count - 2) + r',"\\"]',
}


@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join))
def test_a_lone_surrogate_is_one_that_utf8_cannot_encode(text: str) -> None:
    assert lone_surrogate(f'{{"a": "{text}"}}') == (not is_encodable(json.loads(f'"{text}"')))


@pytest.mark.parametrize("text", COUNTED.values(), ids=COUNTED)
def test_a_text_has_few_values(text: Callable[[int], str]) -> None:
    most = text(MOST_VALUES)
    assert parse_json_text(most) == json.loads(most)
    with pytest.raises(ValueError, match=f"at most {MOST_VALUES} texts, lists and objects"):
        parse_json_text(text(MOST_VALUES + 1))


def test_numbers_and_the_length_of_texts_are_not_counted() -> None:
    assert len(parse_json_text("[" + ",".join(["1"] * 300_000) + "]")) == 300_000
    assert len(parse_json_text('["' + r",[]{}:\"" * 50_000 + '"]')[0]) == 350_000


@pytest.mark.parametrize("text", ['["' + "a" * 100_000, "[" * 100_000, '"' * 100_001, '["a"' + '"' * 100_000])
def test_a_large_text_that_is_no_json_is_rejected(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_json_text(text)
