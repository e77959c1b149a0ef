"""Sizes of nested values: how many bytes a body's texts take, and whether a value holds more than a limit."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.sizes import exceeds, text_bytes

OTHERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    OTHERS | st.text(), lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=2), values)
)


def texts_and_others(value: Any) -> tuple[list[str], int]:
    """All texts of ``value`` but keys, and the number of other values that are no containers."""
    if isinstance(value, str):
        return [value], 0
    if not isinstance(value, dict | list):
        return [], 1
    parts = [texts_and_others(part) for part in (value.values() if isinstance(value, dict) else value)]
    return [text for texts, _ in parts for text in texts], sum(others for _, others in parts)


@given(VALUES)
def test_the_bytes_of_texts_are_those_of_utf8_and_other_values_count_two(value: Any) -> None:
    texts, others = texts_and_others(value)
    assert text_bytes(value) == sum(len(text.encode()) for text in texts) + 2 * others


@pytest.mark.parametrize(("value", "size"), [([1, "é"], 4), (["é", 1], 4), ([], 0), ([1, None, True, 1.5], 8), ({}, 0)])
def test_the_bytes_of_lists_of_two_kinds(value: Any, size: int) -> None:
    assert text_bytes(value) == size


@pytest.mark.parametrize(
    ("value", "size"), [("", 1), ("ab", 3), (7, 1), ([], 1), ([1, 2], 5), (["ab", 1], 7), ({"a": 1, "b": [""]}, 11)]
)
def test_a_value_exceeds_what_is_less_than_its_size(value: Any, size: int) -> None:
    assert exceeds(value, size - 1)
    assert not exceeds(value, size)


def test_a_cyclic_value_exceeds_every_limit() -> None:
    value: list[Any] = [json]
    value.append(value)
    assert exceeds(value, 1000)
