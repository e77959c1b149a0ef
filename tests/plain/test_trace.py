"""A trace gives the origin of every output token, from the tokens that rounds drafted, allowed and emitted."""

from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract.masks import mask_words
from tandemrt.runtime.constraints.roles import RoleSpan
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.trace import RequestTrace, RolePart, TracedToken
from tandemrt.runtime.trace.data import page_data, token_texts
from tandemrt.runtime.trace.recorder import Recorder, step_at
from tests.plain.requests import TOKENIZER, ids, make_running

WINDOW = 4


def followed(**how: object) -> tuple[RunningRequest, RequestTrace, Recorder]:
    running, recorder = make_running(window=WINDOW, **how), Recorder()
    recorder.follow(running.request)
    assert running.request.trace is not None
    return running, running.request.trace, recorder


def one_round(running: RunningRequest, draft: list[int], emitted: list[int] | None = None) -> list[int]:
    """A round as the loop does it: masks, then the tokens that were ``emitted`` (by default what the masks force)."""
    rows = np.zeros((len(draft) + 1, mask_words(256)), np.int32)
    masks, trace = MaskRows(rows), running.request.trace
    passed = len(running.constraint.fill_rows(draft, masks, 0).tokens)
    assert trace is not None
    allowed = [masks.count_allowed(row) for row in range(passed + 1)]
    trace.record_fill(0.0, draft, passed, allowed)
    if emitted is None:
        assert allowed[-1] == 1
        row = rows[passed].view(np.uint8)
        emitted = [*draft[:passed], int(np.flatnonzero(np.unpackbits(row, bitorder="little"))[0])]
    running.commit(emitted, passed)
    return emitted


def sources(running: RunningRequest, trace: RequestTrace) -> list[str]:
    return [token.source for token in trace.tokens(0, running.output_length)]


def test_sources_of_undrafted_accepted_bonus_and_corrected_tokens() -> None:
    running, trace, _ = followed()
    a, b, c = ids("abc")
    one_round(running, [], [a])
    one_round(running, [a, b], [a, b, c])
    one_round(running, [a, b, b], [a, c])
    assert sources(running, trace) == ["undrafted", "accepted", "accepted", "bonus", "accepted", "corrected"]
    assert [token.round for token in trace.tokens(0, 6)] == [0, 1, 1, 1, 2, 2]
    assert [token.drafted for token in trace.tokens(0, 6)] == [False, True, True, False, True, False]
    assert {token.allowed for token in trace.tokens(0, 6)} == {256}


def test_an_exhausted_budget_forces_its_tokens_whatever_was_drafted() -> None:
    running, trace, _ = followed(thinking=True, budget=2, prompt=ids("<think>"))
    end = ids("</think>")
    one_round(running, [*ids("ab"), end[0]])
    for drafted in ([*end[2:4], 0], [0], end[6:7]):
        one_round(running, drafted)
    one_round(running, [], ids("y"))
    count = running.output_length
    assert running.output_ids == [*ids("ab"), *end, *ids("y")]
    assert sources(running, trace) == ["accepted", "accepted", *["budget"] * len(end), "undrafted"]
    assert [t.role for t in trace.tokens(0, count)] == ["reasoning"] * 2 + ["delimiter"] * len(end) + ["answer"]
    assert [t.drafted for t in trace.tokens(2, count - 1)] == [True, False, True, True, False, False, True, False]


def test_the_only_allowed_token_comes_from_a_delimiter_or_from_the_grammar() -> None:
    trace = RequestTrace()
    assert [trace._forced_by(0, role, 1) for role in ("delimiter", "answer", None)] == ["delimiter", *["grammar"] * 2]
    assert trace._forced_by(0, "delimiter", 2) is None


def test_a_draft_rejected_by_its_mask_was_corrected() -> None:
    running, trace, _ = followed(thinking=True, budget=1, prompt=ids("<think>"))
    one_round(running, ids("axy"))
    assert trace.rounds[0].passed == 1
    assert trace.rounds[0].source(1) == "corrected"
    assert sources(running, trace) == ["accepted", "budget"], "and the budget was why"


def test_a_round_that_was_never_committed_leaves_no_trace() -> None:
    running, trace, _ = followed()
    trace.record_fill(0.0, ids("lost"), 4, [256] * 5)
    one_round(running, [], ids("a"))
    assert [token.id for token in trace.tokens(0, 9)] == ids("a")


def test_a_token_of_two_roles_is_one_token_in_two_parts() -> None:
    trace = RequestTrace()
    trace.add_roles(RoleSpan("reasoning", (5, 6)))
    trace.add_roles(RoleSpan("answer", (7, 8), inner=frozenset({0})))
    assert list(trace.parts(1, 3)) == [RolePart(1, "reasoning", 6), RolePart(1, "answer", 7), RolePart(2, "answer", 8)]
    assert list(trace.parts(3, 9)) == []


def fates(recorder: Recorder) -> list[list[str]]:
    (request,) = page_data(recorder, TOKENIZER, "bytes")["requests"]
    return [[draft["fate"] for draft in each["drafted"]] for each in request["rounds"]]


def test_the_page_names_the_reason_for_a_discarded_draft() -> None:
    running, _, recorder = followed(thinking=True, budget=4, prompt=ids("<think>"))
    one_round(running, ids("axyz"), ids("ab"))
    one_round(running, ids("bcxy"))
    running.finish(Finish("cancelled"))
    assert fates(recorder) == [
        ["accepted", "rejected by the target", "after a rejected draft", "after a rejected draft"],
        ["accepted", "accepted", "rejected by the mask", "after a rejected draft"],
    ]


def test_accepted_drafts_after_a_stop_string_are_after_the_end() -> None:
    running, _, recorder = followed(stop=["cd"])
    one_round(running, ids("cdef"), ids("cdefg"))
    assert running.finished
    assert fates(recorder) == [["accepted", "accepted", "after the end", "after the end"]]


letters = st.lists(st.sampled_from(ids("ab</think>")), max_size=WINDOW)


@settings(max_examples=40)
@given(data=st.data(), budget=st.sampled_from([None, 0, 2, 5]))
def test_the_tokens_of_a_trace_are_those_of_the_output(data: st.DataObject, budget: int | None) -> None:
    running, trace, recorder = followed(thinking=True, budget=budget, prompt=ids("<think>"), stop=["ab"])
    while not running.finished and running.output_length < 30:
        draft = data.draw(letters)
        rows = np.zeros((len(draft) + 1, mask_words(256)), np.int32)
        passed = len(running.constraint.fill_rows(draft, MaskRows(rows), 0).tokens)
        taken = data.draw(st.integers(0, passed))
        legal = np.flatnonzero(np.unpackbits(rows[taken].view(np.uint8), bitorder="little"))
        one_round(running, draft, [*draft[:taken], int(data.draw(st.sampled_from(list(legal))))])
    running.finish(Finish("cancelled"))
    assert running.request.output is not None
    expected = running.request.output.token_ids
    (page,) = page_data(recorder, TOKENIZER, "bytes")["requests"]
    assert [token["id"] for token in page["tokens"]] == expected
    assert sum(each["kept"] for each in page["rounds"]) == len(expected)
    for token in trace.tokens(0, len(expected)):
        check_token(token, trace)


def check_token(token: TracedToken, trace: RequestTrace) -> None:
    """Hold a token against its round: a kept one was drafted there, a forced one is the only one allowed."""
    assert token.id in trace.rounds[token.round].emitted
    if token.drafted:
        assert token.id in trace.rounds[token.round].drafted
    assert (token.source in ("grammar", "delimiter", "budget")) == (token.allowed == 1)
    assert token.source != "accepted" or token.drafted


def test_token_texts_join_to_the_text_and_partial_characters_wait() -> None:
    assert token_texts(TOKENIZER, ids("né 日")) == ["n", "", "é", " ", "", "", "日"]
    assert token_texts(TOKENIZER, ids("é")[:1]) == ["\ufffd"]
    assert token_texts(TOKENIZER, []) == []


def test_a_token_that_ends_within_a_second_character_waits_with_its_first() -> None:
    class Bytes:
        """A tokenizer of two tokens: a letter with half of another, and the other half."""

        def decode(self, ids: list[int], **_: object) -> str:
            return b"".join((b"a\xc3", b"\xa9")[each] for each in ids).decode(errors="replace")

    assert token_texts(cast("Any", Bytes()), [0, 1, 0, 1]) == ["", "a\xe9", "", "a\xe9"]
    assert token_texts(cast("Any", Bytes()), [0]) == ["a\ufffd"]


def test_a_step_begins_with_a_prefill_and_incomplete_ones_are_left_out() -> None:
    recorder = Recorder()
    recorder.span("verify", 0.0, 1.0)  # of a step whose beginning was dropped
    for begin in (2.0, 4.0):
        recorder.span("prefill", begin, begin + 0.5)
        recorder.span("fill", begin + 1.0, begin + 1.5)
    steps = recorder.steps()
    assert [(step.number, step.start, step.end) for step in steps] == [(0, 2.0, 3.5), (1, 4.0, 5.5)]
    assert step_at(steps, 5.2) == steps[1]
    assert step_at(steps, 0.5) is None


def test_a_round_keeps_no_token_after_the_end_of_the_text() -> None:
    running, _, recorder = followed(stop=["cd"])
    one_round(running, ids("ab"), ids("ab!"))
    one_round(running, ids("cdef"), ids("cdefg"))
    assert running.finished
    assert running.request.output is not None
    assert len(running.request.output.token_ids) == 5
    (request,) = page_data(recorder, TOKENIZER, "bytes")["requests"]
    counts = [(each["emitted"], each["accepted"], each["kept"]) for each in request["rounds"]]
    assert counts == [(3, 2, 3), (5, 4, 2)]


def test_a_round_has_the_sum_of_all_spans_of_each_phase() -> None:
    running, trace, recorder = followed()
    for begin in (2.0, 4.0):
        for phase, at, seconds in (("prefill", 0, 0.5), ("fill", 0.5, 0.25), ("commit", 0.75, 0.25), ("fill", 1, 0.5)):
            recorder.span(phase, begin + at, begin + at + seconds)
    for filled, token in ((2.5, "a"), (4.5, "b"), (1.0, "c")):
        trace.record_fill(filled, [], 0, [256])
        running.commit(ids(token), 0)
    running.finish(Finish("cancelled"))
    (request,) = page_data(recorder, TOKENIZER, "bytes")["requests"]
    phases = {"prefill": 500.0, "fill": 750.0, "commit": 250.0}
    assert [(each["step"], each["start"], each["ms"], each["phases"]) for each in request["rounds"]] == [
        (0, 0.0, 1500.0, phases),
        (1, 2000.0, 1500.0, phases),
        (None, None, None, {}),  # before the first step that was recorded
    ]
