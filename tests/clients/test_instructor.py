"""instructor in an environment of its own, because it needs older packages than the other tests."""

import pytest

from tests.clients.conftest import Ask

ORDER = {"kind": "order", "customer": "Leo Conti", "currency": "GBP"}


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "RESPONSES_TOOLS"])
def test_instructor_gets_an_object_complete_and_streamed(ask: Ask, mode: str) -> None:
    assert ask("ask_instructor.py", mode) == [ORDER, ORDER]
