"""What a listener hears is the request's text, token by token, however the request ends."""

import pytest

from tandemrt import StreamOutput
from tests.plain.requests import TOKENIZER, ids, make_running


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("abc<thi", "", "abc<thi"),
        ("abc<think>why </thin", "why </thin", "abc"),
        ("<think>why</think>so <", "why", "so <"),
    ],
)
@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_might_have_become_a_marker_is_text_when_a_request_is_interrupted(
    text: str, reasoning: str, answer: str, reason: str
) -> None:
    heard: list[StreamOutput] = []
    running = make_running(heard.append, thinking=True)
    for token in ids(text):
        running.commit([token], 0)
        running.tell()
    running.finish(reason)
    running.tell()
    output = heard[-1].output
    assert output is not None
    assert (output.reasoning, output.text, output.finish_reason) == (reasoning, answer, reason)
    assert "".join(item.text for item in heard) == answer
    assert "".join(item.reasoning for item in heard) == reasoning
    assert [token for item in heard for token in item.token_ids] == output.token_ids == ids(text)


def test_no_token_is_told_that_a_stop_string_then_cuts_off() -> None:
    """The marker's beginning is held back until "X" decides it, and the stop string ends inside of it."""
    heard: list[StreamOutput] = []
    running = make_running(heard.append, thinking=True, stop=["a<t"])
    for token in ids("a<thinX"):
        running.commit([token], 0)
        running.tell()
        if running.finished:
            break
    output = heard[-1].output
    assert output is not None
    assert (output.text, output.stop_reason) == ("", "a<t")
    assert [token for item in heard for token in item.token_ids] == output.token_ids == ids("a<t")


def test_a_listener_that_raises_cancels_its_request_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: StreamOutput) -> None:
        raise RuntimeError("nobody listens")

    running = make_running(broken)
    running.commit(ids("a"), 0)
    running.tell()
    assert running.request.interrupted(0.0) == "cancelled"
    running.finish("cancelled")
    running.tell()
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert TOKENIZER.decode(running.output_ids) == "a"


def test_the_first_end_is_the_one_that_counts() -> None:
    running = make_running(stop=["b"])
    running.commit(ids("abc"), 2)
    running.finish("cancelled")
    assert running.request.output is not None
    assert (running.request.output.finish_reason, running.request.output.stop_reason) == ("stop", "b")
    assert running.request.output.token_ids == ids("ab")
