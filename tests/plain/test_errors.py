"""Errors quote values in a limited number of characters."""

from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation import errors
from tandemrt.engines.validation.errors import QUOTED, BadRequest, clipped, named, quoted
from tandemrt.runtime.servers.openai.errors import error_body, status_of
from tandemrt.runtime.servers.request_stream import RequestCancelled, RequestTimeout

DIGITS = 10**5000  # above Python's limit for conversion to text


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


LARGE = ["x" * 10**6, b"x" * 10**6, ["x" * 1000] * 1000, {str(i): i for i in range(10**5)}, tuple(range(10**6))]
STRANGE = [DIGITS, -DIGITS, [DIGITS], nested(10**5), cyclic(), Broken(), [Broken()], UserList([1] * 10**5)]


@pytest.mark.parametrize("value", [1, "a", [1, "a"], {"a": None}, b"a", (1.5,), "x" * (QUOTED - 2)])
def test_a_short_value_is_quoted_as_its_repr(value: Any) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("value", LARGE + STRANGE, ids=lambda value: type(value).__name__)
def test_any_value_can_be_quoted_in_few_characters(value: Any) -> None:
    assert 0 < len(quoted(value)) <= QUOTED
    assert len(quoted([value])) <= QUOTED


def test_clipped_text_ends_with_an_ellipsis() -> None:
    assert quoted("x" * 1000) == "'" + "x" * (QUOTED - 4) + "..."
    assert clipped("x" * QUOTED) == "x" * QUOTED
    assert clipped("x" * (QUOTED + 1)) == "x" * (QUOTED - 3) + "..."


def test_an_error_has_its_kind_and_foreign_messages_are_clipped() -> None:
    assert named(KeyError("x" * 1000)) == "KeyError: '" + "x" * (QUOTED - 4) + "..."
    assert named(ValueError("short")) == "ValueError: short"
    own = BadRequest("\n".join(["a line that says what to do"] * 20))  # a long message without quotes
    assert named(own) == f"BadRequest: {own}"


def refusal(ask: Callable[..., Any], **asked: Any) -> str:
    """Return the error that rejects the request, or ""."""
    try:
        ask(**asked)
    except BadRequest as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", LARGE + STRANGE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("ask", [SamplingParams, StructuredOutputs, RuntimeOptions])
def test_errors_quote_long_values_in_few_characters(ask: Callable[..., Any], value: Any) -> None:
    names = [field.alias or name for name, field in ask.model_fields.items()]  # type: ignore[attr-defined]
    refusals = {name: refusal(ask, **{name: value}) for name in (*names, "unknown", "x" * 10**5)}
    assert sum(map(bool, refusals.values())) > len(names) / 2
    for text in refusals.values():
        lines = text.split("\n")
        assert len(lines) <= 21
        assert max(map(len, lines)) < 1000


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Closed, 503, "closed"),
        (RequestCancelled, 503, "closed"),
        (errors.ProcessLost, 503, "process_lost"),
        (errors.QueueFull, 429, "queue_full"),
        (RequestTimeout, 504, "timeout"),
        (errors.InternalError, 500, "internal_error"),
        (errors.BackendUnavailable, 500, "internal_error"),
        (ZeroDivisionError, 500, "internal_error"),
    ],
)
def test_a_client_sees_whether_it_may_send_a_request_again(error: type[Exception], status: int, code: str) -> None:
    """Clients of OpenAI send it again after 429 and 5xx; the code tells the reason."""
    failure = error("text")
    assert (status_of(failure).status, error_body(failure)["error"]["code"]) == (status, code)


class Unread:
    def __repr__(self) -> str:
        raise AssertionError("a part that no quote shows must not be formatted")


@pytest.mark.parametrize("kind", [list, tuple, lambda values: dict(enumerate(values))])
def test_parts_beyond_what_a_quote_shows_are_not_formatted(kind: Callable[..., Any]) -> None:
    assert len(quoted(kind([1] * 1000 + [Unread()]))) == QUOTED
