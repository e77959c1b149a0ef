"""The listener gets the request's text, token by token, however the request ends."""

from typing import NamedTuple

import pytest

from tandemrt import StreamOutput
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.request import Finish
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
def test_undecided_tokens_become_text_when_a_request_is_interrupted(
    text: str, reasoning: str, answer: str, reason: str
) -> None:
    items: list[StreamOutput] = []
    running = make_running(items.append, thinking=True)
    for token in ids(text):
        running.commit([token], 0)
        running.notify()
    running.finish(Finish(reason))
    running.notify()
    output = items[-1].output
    assert output is not None
    assert (output.reasoning, output.text, output.finish_reason) == (reasoning, answer, reason)
    assert "".join(item.text for item in items) == answer
    assert "".join(item.reasoning for item in items) == reasoning
    assert [token for item in items for token in item.token_ids] == output.token_ids == ids(text)


def test_the_listener_gets_no_token_that_a_stop_string_removes() -> None:
    """The delimiter's beginning is held back until "X" decides it, and the stop string ends inside of it."""
    items: list[StreamOutput] = []
    running = make_running(items.append, thinking=True, stop=["a<t"])
    for token in ids("a<thinX"):
        running.commit([token], 0)
        running.notify()
        if running.finished:
            break
    output = items[-1].output
    assert output is not None
    assert (output.text, output.stop_reason) == ("", "a<t")
    assert [token for item in items for token in item.token_ids] == output.token_ids == ids("a<t")


def test_a_listener_that_wants_no_stream_gets_the_whole_output_once() -> None:
    items: list[StreamOutput] = []
    running = make_running(items.append, streams=False)
    for token in ids("abc"):
        running.commit([token], 0)
        running.notify()
    assert not items
    running.finish(Finish("length"))
    running.notify()
    [item] = items
    assert item.output is not None
    assert (item.text, item.token_ids, item.output.text) == ("abc", ids("abc"), "abc")


def test_a_listener_that_raises_cancels_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: StreamOutput) -> None:
        raise RuntimeError("the listener failed")

    caplog.clear()
    running = make_running(broken)
    running.commit(ids("a"), 0)
    running.notify()
    assert running.request.interrupted(0.0) == Finish("cancelled")
    running.finish(Finish("cancelled"))
    running.notify()
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert TOKENIZER.decode(running.output_ids) == "a"


def test_only_the_first_finish_has_an_effect() -> None:
    running = make_running(stop=["b"])
    running.commit(ids("abc"), 2)
    running.finish(Finish("cancelled"))
    assert running.request.output is not None
    assert (running.request.output.finish_reason, running.request.output.stop_reason) == ("stop", "b")
    assert running.request.output.token_ids == ids("ab")


class Counted(NamedTuple):
    """All that is counted of a finished request."""

    forced_ends: int
    reasoning_ends_mid_round: int
    accepted: list[int]


def commit_all(text: str, *windows: int, budget: int | None = None, stop: str) -> Counted:
    """Commit ``text`` in windows of so many tokens, a drafted token for each but the last of a window."""
    running = make_running(thinking=True, prompt=ids("p"), budget=budget, window=18, stop=[stop])
    accepted, certain, at = [], 0, 0
    for size in windows:
        emitted, at = ids(text)[at : at + size], at + size
        accepted += running.commit(emitted, max(1, size - 1))
        assert running.final_length >= certain, "what was certain was taken back"
        certain = running.final_length
        if running.finished:
            break
    output = running.request.output
    assert output is not None
    assert output.stop_reason == stop
    assert (output.forced_ends, output.speculation.num_spec_steps) == (running.forced_ends, len(accepted))
    assert output.speculation.num_accepted_draft_tokens == sum(accepted)
    assert len(output.token_ids) == certain
    return Counted(running.forced_ends, running.reasoning_ends_mid_round, accepted)


def test_a_forced_end_after_a_stop_string_is_not_counted() -> None:
    text = "<think>ab</think>"
    for windows in ([1] * 18, [9, 9], [18]):
        assert commit_all("x" + text, *windows, budget=2, stop="x").forced_ends == 0
    assert commit_all(text + "x", *[1] * 18, budget=2, stop="x").forced_ends == 1
    assert commit_all(text + "x", 18, budget=2, stop="x").forced_ends == 1


def test_an_end_of_reasoning_after_a_stop_string_is_not_counted() -> None:
    assert commit_all("b<think>a</think>c", 18, stop="b").reasoning_ends_mid_round == 0
    assert commit_all("<think>ab</think>ab", 7, 12, stop="b").reasoning_ends_mid_round == 1


def test_drafts_removed_by_a_stop_string_do_not_count_as_accepted() -> None:
    """The beginning of a delimiter is held back, and a stop string ends inside of it windows later."""
    assert commit_all("a<thinX", 1, 5, 1, stop="a<t").accepted == [0, 1]
    assert commit_all("a<thinX", 2, 3, 2, stop="a<t").accepted == [1, 0]
    assert commit_all("a<thinX", 3, 2, 2, stop="a<t").accepted == [2]
    assert commit_all("a<thinX", 7, stop="a<t").accepted == [2]


def test_drafts_are_recorded_however_a_request_ends() -> None:
    running = make_running(thinking=True)
    assert running.commit(ids("ab"), 1) == [1]
    assert running.commit(ids("<t"), 1) == [], "it may become a delimiter, so it may be cut off"
    assert running.finish(Finish("cancelled")) == [1]
    assert running.speculation.num_spec_steps == 2


@pytest.mark.parametrize(
    ("failure", "error"),
    [(MemoryError(), "MemoryError: "), (KeyError("x"), "KeyError: 'x'"), (BadRequest("no"), "BadRequest: no")],
)
def test_the_error_of_an_output_names_its_kind(failure: Exception, error: str) -> None:
    running = make_running()
    running.finish(Finish("error", failure))
    assert running.request.output is not None
    assert running.request.output.error == error
