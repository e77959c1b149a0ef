"""Behaviour of a constraint: the tokens each phase allows, how reasoning blocks end, how requests end."""

import gc
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest

from tandemrt.engines.validation.errors import BadRequest, InternalError
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.constraints.transitions import Phase
from tests.plain.constraints import (
    CALL,
    END,
    EVERYTHING,
    MERGED,
    OTHER,
    OTHER_STOP,
    STOP,
    THINK,
    TOO_COMPLEX_AFTER_A_BRACE,
    UNREAD,
    VALID,
    VOCABULARY,
    WIDTH,
    WORDS,
    allowed,
    byte_tokens,
    compiled,
    constraint,
    fill,
    joined_spans,
    json_grammar,
    regex_grammar,
    rows_for,
    tokens_in,
)

A, B, C, PHRASE, TAIL, BRACE = 97, 98, 99, 33, 58, 123
FLAG = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FLAG_TEXT = byte_tokens('{"ok": true}')


def rule(**change):
    arguments = {"think_start": (THINK,), "think_ends": [(END,)], "forced_end": (END,)} | change
    return ThinkingRule(**arguments, vocabulary=VOCABULARY)


# The phase after the prompt.


@pytest.mark.parametrize(
    ("prompt", "phase"),
    [
        ([], Phase.OPEN),
        ([A, B], Phase.OPEN),
        ([A, THINK], Phase.THINKING),
        ([A, THINK, B, END], Phase.ANSWER),
        ([A, THINK, B, END, C, THINK], Phase.THINKING),
        ([A, THINK, B, CALL], Phase.ANSWER),
    ],
)
def test_the_last_delimiter_of_the_prompt_decides_the_phase(prompt, phase):
    assert constraint(prompt=prompt, thinking=rule(implicit_ends=[(CALL,)])).phase is phase


def test_without_a_thinking_rule_a_request_begins_in_the_answer():
    state = constraint(prompt=[THINK])
    assert state.phase is Phase.ANSWER
    assert allowed(state) == EVERYTHING


def test_requests_share_their_ordinary_tokens_and_keep_no_vocabulary_of_a_closed_model():
    """A process that opened and closed models kept the vocabularies of 64 of them."""
    vocabulary = replace(VOCABULARY)
    thinking = ThinkingRule((THINK,), [(END,)], (END,), vocabulary=vocabulary)
    one, other = (Constraint(WIDTH, [STOP], thinking=thinking, valid_tokens=VALID) for _ in range(2))
    assert one._rules.ordinary is other._rules.ordinary
    assert A in one._rules.ordinary
    assert THINK not in one._rules.ordinary
    closed = ref(vocabulary)
    del vocabulary, thinking, one, other
    gc.collect()
    assert closed() is None


# Tokens that each phase allows.


def test_padding_of_the_logits_is_always_masked():
    for options in ({}, {"thinking": rule(), "prompt": [THINK]}, {"grammar": json_grammar({"type": "string"})}):
        state = constraint(**options)
        for _ in range(2):
            assert allowed(state) <= EVERYTHING
            state.commit([34])


def test_reasoning_allows_every_token_but_stop_tokens():
    state = constraint(stop_ids=(STOP, OTHER_STOP), thinking=rule(), prompt=[THINK])
    assert allowed(state) == EVERYTHING - {STOP, OTHER_STOP}


def test_banned_and_allowed_tokens_apply_in_every_phase_but_a_forced_end():
    state = constraint(thinking=rule(budget=1), prompt=[THINK], banned=[B, END], allowed=[A, B, STOP, END])
    assert allowed(state) == {A}
    state.commit([A])
    assert allowed(state) == {END}
    state.commit([END])
    assert allowed(state) == {A, STOP}


def test_stop_tokens_are_masked_before_min_tokens():
    state = constraint(min_tokens=2)
    for _ in range(2):
        assert allowed(state) == EVERYTHING - {STOP}
        state.commit([A])
    assert allowed(state) == EVERYTHING


def test_control_tokens_cannot_appear_inside_a_json_string():
    state = constraint(grammar=json_grammar({"type": "string"}))
    state.commit([34])
    inside = allowed(state)
    assert inside.isdisjoint({THINK, END, CALL, OTHER, OTHER_STOP, STOP})
    assert MERGED[b"<|"] in inside, "the text of a control token is ordinary text"


# Draft windows.


def test_a_delimiter_inside_the_draft_window_switches_the_rows_after_it():
    """Rows up to the end delimiter allow any reasoning token, later rows are the grammar's."""
    state = constraint(thinking=rule(), prompt=[THINK], grammar=json_grammar(FLAG))
    draft = [A, END, *FLAG_TEXT[:3], A]
    rows = rows_for(draft)
    assert fill(state, draft, rows) == 5
    assert [tokens_in(row) for row in rows[:3]] == [EVERYTHING - {STOP}] * 2 + [{123, MERGED[b'{"']}]
    assert tokens_in(rows[5]) == {ord("k")}
    assert (rows[6] == UNREAD).all()


def test_a_rejected_draft_of_an_end_delimiter_leaves_the_block_open():
    state = constraint(thinking=rule(), prompt=[THINK], grammar=json_grammar(FLAG))
    fill(state, [END, *FLAG_TEXT], rows_for([END, *FLAG_TEXT]))
    assert state.commit([A]).kept == [A]
    assert state.phase is Phase.THINKING
    state.commit([END])
    assert allowed(state) == {123, MERGED[b'{"']}, "the grammar has seen nothing yet"


def test_the_usable_draft_ends_before_the_first_masked_token():
    state = constraint(grammar=json_grammar(FLAG))
    draft = [*FLAG_TEXT[:2], A, *FLAG_TEXT[3:6]]
    rows = rows_for(draft)
    assert fill(state, draft, rows) == 2
    assert (rows[3:] == UNREAD).all()


@pytest.mark.parametrize("stray", [-1, VALID, WIDTH, 10**9])
def test_a_drafted_id_outside_the_vocabulary_is_cut(stray):
    rows = rows_for([A, stray])
    assert fill(constraint(), [A, stray], rows) == 1


@pytest.mark.parametrize("stray", [-1, VALID, 10**9])
def test_committing_an_id_outside_the_vocabulary_raises_an_internal_error(stray):
    with pytest.raises(InternalError, match="is forbidden in phase open"):
        constraint(thinking=rule(), grammar=json_grammar(FLAG)).commit([stray])


def test_drafts_after_a_stop_token_are_discarded():
    state = constraint(grammar=json_grammar(FLAG))
    draft = [*FLAG_TEXT, STOP, A, STOP, 123]
    rows = rows_for(draft)
    assert fill(state, draft, rows) == len(FLAG_TEXT) + 1
    commit = state.commit(draft)
    assert (commit.kept, commit.finish, commit.stop_token) == ([*FLAG_TEXT, STOP], "stop", STOP)


def test_a_rejected_draft_of_a_stop_token_leaves_the_request_running():
    state = constraint(grammar=regex_grammar("a+"))
    state.commit([A])
    assert fill(state, [STOP, A], rows_for([STOP, A])) == 1
    assert state.commit([A]).finish is None
    assert allowed(state) == {A, STOP}


def test_a_finished_request_may_stay_in_the_batch():
    state = constraint(grammar=json_grammar(FLAG))
    state.commit([*FLAG_TEXT, STOP])
    rows = rows_for([A, A])
    assert fill(state, [A, A], rows) == 0
    assert (rows == UNREAD).all()
    assert state.commit([A]).kept == []
    assert state.commit([]).finish == "stop"


def test_a_commit_without_tokens_changes_nothing():
    state = constraint(grammar=json_grammar(FLAG))
    state.commit(FLAG_TEXT[:3])
    before = allowed(state)
    assert state.commit([]).finish is None
    assert allowed(state) == before


def test_the_grammar_accepts_the_first_token_of_an_answer_exactly_once():
    state = constraint(grammar=regex_grammar("ab"), thinking=rule(), prompt=[THINK])
    state.commit([END, A])
    assert allowed(state) == {B}


def test_fill_rows_writes_only_the_requested_rows():
    rows = np.full((6, WORDS), UNREAD, np.int32)
    state = constraint(grammar=regex_grammar("ab"))
    assert state.fill_rows([A], MaskRows(rows), 2).tokens == [A]
    assert [tokens_in(row) for row in rows[2:4]] == [{A}, {B}]
    assert (rows[[0, 1, 4, 5]] == UNREAD).all()


# The end of a request.


def test_the_request_ends_exactly_at_max_tokens():
    state = constraint(max_tokens=3)
    assert fill(state, [A, A, A, A], rows_for([A] * 4)) == 3
    commit = state.commit([A, A, A, A])
    assert (commit.kept, commit.finish, commit.stop_token) == ([A, A, A], "length", None)


def test_a_stop_token_at_max_tokens_gives_finish_reason_stop():
    assert constraint(max_tokens=2).commit([A, STOP]).finish == "stop"


def test_an_empty_row_ends_the_request_and_keeps_the_text():
    state = constraint(grammar=regex_grammar("ab"), banned=[B])
    rows = rows_for([A, B])
    assert fill(state, [A, B], rows) == 1
    assert not rows[1].any()
    commit = state.commit([A])
    assert (commit.kept, commit.finish) == ([A], "constraint")
    assert joined_spans([commit]) == [("answer", (A,))]


def test_an_empty_first_row_ends_the_request_without_tokens():
    state = constraint(grammar=regex_grammar("a"), min_tokens=5)
    state.commit([A])
    rows = rows_for([STOP])
    assert fill(state, [STOP], rows) == 0
    assert state.allows_nothing
    assert state.commit([]).finish == "constraint"
    assert state.finished


def test_a_too_complex_draft_ends_only_the_text_that_contains_it():
    """The row after the too complex token allows no token. Texts without this token continue."""
    state = constraint(grammar=json_grammar(TOO_COMPLEX_AFTER_A_BRACE))
    plain, rows = allowed(state), rows_for("...")
    assert fill(state, [BRACE, ord('"'), ord("a")], rows) == 1
    assert (tokens_in(rows[0]), tokens_in(rows[1])) == (plain, frozenset())
    number = state.fork()
    assert number.commit(byte_tokens("17")).finish is None
    assert fill(number, [STOP], rows) == 1
    assert state.commit([BRACE]).kept == [BRACE]
    assert state.fast_forward_tokens(9) == []
    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        fill(state, [], rows)


def test_a_draft_row_that_fails_to_fill_allows_no_token(monkeypatch):
    grammar = regex_grammar("abc")
    written = grammar.fill_row

    def fill_and_fail(row):
        written(row)
        if grammar._text:
            raise BadRequest("too complex")

    monkeypatch.setattr(grammar, "fill_row", fill_and_fail)
    rows = rows_for("..")
    assert fill(constraint(grammar=grammar), [A, B], rows) == 1
    assert not rows[1].any()


def test_tokens_before_a_too_complex_text_are_kept():
    for draft in ([], [MERGED[b"\n\n"]], [A, BRACE], [A, BRACE, A]):
        state = constraint(
            thinking=rule(think_start=(A, A)), grammar=json_grammar(TOO_COMPLEX_AFTER_A_BRACE), prompt=[A]
        )
        state.fill_rows(draft, MaskRows(rows_for("....")), 0)
        assert state.commit([BRACE]).kept == [BRACE]
        with pytest.raises(BadRequest, match="too complex"):
            state.fill_rows([], MaskRows(rows_for("....")), 0)


def test_a_grammar_waits_for_min_tokens_without_stop_ids_of_the_request():
    state = constraint(stop_ids=(), grammar=regex_grammar("ab?"), min_tokens=2)
    state.commit([A])
    assert allowed(state) == {B}
    state.commit([B])
    assert allowed(state) == {STOP}


def test_an_empty_row_is_found_without_filling_rows():
    state = constraint(grammar=regex_grammar("a"), banned=[A])
    assert state.commit([]).finish == "constraint"


def test_an_empty_row_after_a_rejected_draft_ends_no_request():
    state = constraint(grammar=regex_grammar("ab|cc"), banned=[B])
    fill(state, [A], rows_for([A]))
    assert state.commit([C]).finish is None
    assert allowed(state) == {C}


@pytest.mark.parametrize("phase_tokens", [[], [END], [END, *FLAG_TEXT[:2]]])
def test_committing_a_masked_token_raises_an_internal_error_and_changes_nothing(phase_tokens):
    state = constraint(thinking=rule(), prompt=[THINK], grammar=json_grammar(FLAG))
    state.commit(phase_tokens)
    before = allowed(state)
    good = sorted(before - {END})[0]
    with pytest.raises(InternalError, match=f"token {STOP} at index 1"):
        state.commit([good, STOP])
    assert allowed(state) == before


# Budgets.


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
@pytest.mark.parametrize("forced_end", [(END,), (PHRASE, END), (END, TAIL), (PHRASE, END, TAIL)])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_a_spent_budget_forces_the_whole_end_inside_any_draft_window(budget, forced_end, window):
    """Exactly N reasoning tokens, then mask rows of one bit. The grammar is not consulted there."""
    state = constraint(thinking=rule(budget=budget, forced_end=forced_end), prompt=[THINK], grammar=json_grammar(FLAG))
    text = [*[A] * budget, *forced_end, *FLAG_TEXT, STOP]
    commits = []
    out = 0
    while not state.finished:
        draft = text[out : out + window]
        rows = rows_for(draft)
        assert fill(state, draft, rows) == len(draft)
        for index, row in enumerate(rows[: len(text) - out]):
            place = out + index - budget
            if 0 <= place < len(forced_end):
                assert tokens_in(row) == {forced_end[place]}
            elif place < 0:
                assert tokens_in(row) == EVERYTHING - {STOP}
        commits.append(state.commit(draft))
        out += len(commits[-1].kept)
    assert out == len(text)
    assert (state.forced_ends, state.reasoning_tokens) == (1, budget)
    phrase = tuple([A] * budget) + forced_end[: forced_end.index(END)]
    expected = [("reasoning", phrase), ("delimiter", forced_end[forced_end.index(END) :]), ("answer", tuple(FLAG_TEXT))]
    assert joined_spans(commits) == [span for span in expected if span[1]]


def test_an_end_delimiter_as_the_last_budgeted_token_is_not_forced():
    state = constraint(thinking=rule(budget=2), prompt=[THINK])
    state.commit([A, END])
    assert (state.phase, state.forced_ends, state.reasoning_tokens) == (Phase.ANSWER, 0, 1)


def test_reasoning_in_the_prompt_counts_against_the_budget():
    state = constraint(thinking=rule(budget=3), prompt=[THINK, A, A])
    state.commit([A])
    assert allowed(state) == {END}
    assert constraint(thinking=rule(budget=2), prompt=[THINK, A, A]).phase is Phase.FORCING


def test_a_second_block_has_its_own_budget():
    state = constraint(thinking=rule(budget=2), prompt=[THINK])
    state.commit([A, A, END, B, THINK, A])
    assert allowed(state) == EVERYTHING - {STOP}
    state.commit([A])
    assert allowed(state) == {END}
    state.commit([END])
    assert state.forced_ends == 2


def test_without_a_reasoning_block_no_token_is_forced():
    state = constraint(thinking=rule(budget=0))
    state.commit([A, B])
    assert allowed(state) == EVERYTHING


def test_without_a_grammar_text_after_the_forced_delimiter_is_answer_text():
    state = constraint(thinking=rule(budget=0, forced_end=(PHRASE, END, TAIL)), prompt=[THINK])
    commit = state.commit([PHRASE, END, TAIL, A, STOP])
    assert joined_spans([commit]) == [("reasoning", (PHRASE,)), ("delimiter", (END,)), ("answer", (TAIL, A))]


def test_a_forced_end_with_two_delimiters_ends_the_reasoning_at_the_first():
    state = constraint(thinking=rule(budget=0, forced_end=(PHRASE, END, TAIL, END)), prompt=[THINK])
    commit = state.commit([PHRASE, END, TAIL, END, A, STOP])
    assert joined_spans([commit]) == [("reasoning", (PHRASE,)), ("delimiter", (END,)), ("answer", (TAIL, END, A))]


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_max_tokens_may_end_a_request_inside_a_forced_end(max_tokens):
    state = constraint(thinking=rule(budget=1, forced_end=(PHRASE, END, TAIL)), prompt=[THINK], max_tokens=max_tokens)
    commit = state.commit([A, PHRASE, END, TAIL, B][:max_tokens])
    assert (commit.finish, len(commit.kept)) == ("length", max_tokens)
    assert state.forced_end_spans == [range(1, max_tokens)]


# Delimiters of several tokens.


def test_a_delimiter_may_begin_in_the_prompt_and_end_in_the_output():
    state = constraint(thinking=rule(think_ends=[(B, C)], forced_end=(B, C)), prompt=[THINK, A, B])
    commit = state.commit([C, A])
    assert state.phase is Phase.ANSWER
    assert joined_spans([commit]) == [("delimiter", (C,)), ("answer", (A,))]
    assert state.reasoning_tokens == 1
    opening = constraint(thinking=rule(think_start=(A, B)), prompt=[C, A])
    opening.commit([B])
    assert opening.phase is Phase.THINKING


@pytest.mark.parametrize(("pattern", "fits"), [("nk", True), ("n", False)])
def test_a_token_may_begin_and_end_a_block_if_the_grammar_accepts_the_rest_of_it(pattern, fits):
    t, h, i = byte_tokens("thi")
    thinking = rule(think_start=(t,), think_ends=[(h, i)], forced_end=(h, i))
    assert (MERGED[b"think"] in allowed(constraint(grammar=regex_grammar(pattern), thinking=thinking))) == fits


def test_tokens_of_a_possible_delimiter_are_held_back_until_it_is_decided():
    state = constraint(thinking=rule(think_ends=[(B, B, C)], forced_end=(B, B, C)), prompt=[THINK])
    assert [joined_spans([state.commit([token])]) for token in (A, B, B, B, C, A)] == [
        [("reasoning", (A,))],
        [],
        [],
        [("reasoning", (B,))],
        [("delimiter", (B, B, C))],
        [("answer", (A,))],
    ]


def test_held_back_tokens_are_released_when_the_request_ends():
    state = constraint(thinking=rule(think_start=(A, B)), max_tokens=2)
    assert joined_spans([state.commit([C, A])]) == [("answer", (C, A))]


def test_the_stop_token_is_in_no_span():
    assert joined_spans([constraint().commit([A, STOP])]) == [("answer", (A,))]


# Implicit ends.


def test_an_implicit_end_is_answer_text_and_advances_the_grammar():
    state = constraint(
        thinking=rule(implicit_ends=[(B,)]), prompt=[THINK], grammar=regex_grammar("bc"), stop_ids=[STOP]
    )
    commits = [state.commit([A]), state.commit([B])]
    assert allowed(state) == {C}
    commits.append(state.commit([C, STOP]))
    assert joined_spans(commits) == [("reasoning", (A,)), ("answer", (B, C))]


def test_an_implicit_end_that_the_grammar_cannot_begin_with_is_masked():
    state = constraint(thinking=rule(implicit_ends=[(CALL,), (B, C)]), prompt=[THINK], grammar=json_grammar(FLAG))
    assert allowed(state) == EVERYTHING - {STOP, CALL}
    state.commit([B])
    assert allowed(state) == EVERYTHING - {STOP, CALL, C}


@pytest.mark.parametrize(("pattern", "in_prompt_ends"), [("c", True), ("bbc", False)])
def test_the_row_within_an_implicit_end_depends_on_what_the_prompt_has_of_it(pattern, in_prompt_ends):
    """The grammar is fed no symbol of the prompt, so one place in the delimiter has two rows in one request."""
    end = {"thinking": rule(implicit_ends=[(B, B, C)]), "stop_ids": [STOP]}
    state = constraint(prompt=[THINK, B, B], grammar=regex_grammar(pattern), **end)
    assert (C in allowed(state)) is in_prompt_ends
    state.commit([A, B, B])
    assert (C in allowed(state)) is not in_prompt_ends
    partly = constraint(prompt=[THINK, B], grammar=regex_grammar("bc"), **end)
    partly.commit([B])
    assert C in allowed(partly)
    partly.commit([A, B, B])
    assert C not in allowed(partly)


def test_without_a_grammar_every_implicit_end_is_allowed():
    state = constraint(thinking=rule(implicit_ends=[(CALL,)], budget=1), prompt=[THINK])
    state.commit([CALL])
    assert state.phase is Phase.ANSWER


# The beginning of an output, which may be reasoning or an answer, with a grammar.


def test_an_output_may_begin_with_a_reasoning_block_or_with_the_grammar():
    state = constraint(thinking=rule(), grammar=json_grammar(FLAG))
    assert allowed(state) == {123, MERGED[b'{"'], THINK}
    thinker = state.fork()
    thinker.commit([THINK])
    assert thinker.phase is Phase.THINKING
    state.commit([123])
    assert state.phase is Phase.ANSWER
    assert THINK not in allowed(state)


def test_a_start_delimiter_that_the_grammar_rejects_must_be_completed():
    state = constraint(thinking=rule(think_start=(A, B, C)), grammar=json_grammar(FLAG))
    assert allowed(state) == {123, MERGED[b'{"'], A}
    commits = [state.commit([A])]
    assert allowed(state) == {B}
    commits += [state.commit([B]), state.commit([C])]
    assert state.phase is Phase.THINKING
    assert joined_spans(commits) == [("delimiter", (A, B, C))]


def test_a_start_delimiter_that_is_also_grammar_text_stays_undecided():
    state = constraint(thinking=rule(think_start=(A, B)), grammar=regex_grammar("a(c|d)e"))
    state.commit([A])
    assert allowed(state) == {B, C, ord("d")}
    answer, block = state.fork(), state
    commit = answer.commit([C])
    assert (answer.phase, joined_spans([commit])) == (Phase.ANSWER, [("answer", (A, C))])
    assert allowed(answer) == {ord("e")}
    block.commit([B, END])
    assert allowed(block) == {A}, "the grammar starts anew after the block"


def test_a_start_delimiter_that_began_in_the_prompt_may_be_completed_with_a_grammar():
    state = constraint(thinking=rule(think_start=(A, B)), grammar=json_grammar(FLAG), prompt=[C, A])
    assert allowed(state) == {123, MERGED[b'{"'], A, B}
    state.commit([B])
    assert state.phase is Phase.THINKING


def test_a_banned_start_delimiter_is_masked():
    state = constraint(thinking=rule(), grammar=json_grammar(FLAG), banned=[THINK])
    assert allowed(state) == {123, MERGED[b'{"']}


# Invalid options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_ids": [VALID]}, "stop_ids: token ids must be in"),
        ({"banned": [-1]}, "banned: token ids must be in"),
        ({"banned": ["a"]}, "banned: must be token ids"),
        ({"allowed": [WIDTH]}, "allowed: token ids must be in"),
        ({"allowed": []}, "allowed: the list is empty"),
        ({"valid_tokens": WIDTH + 1}, "valid_tokens: must be in"),
        ({"valid_tokens": 0}, "valid_tokens: must be in"),
        ({"min_tokens": -1}, "min_tokens: must be an integer >= 0"),
        ({"min_tokens": 1.5}, "min_tokens: must be an integer >= 0"),
        ({"max_tokens": 0}, "max_tokens: must be an integer >= 1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: must not be above max_tokens"),
        ({"thinking": rule(think_start=(VALID,))}, "thinking.think_start: token ids must be in"),
        ({"thinking": rule(think_start=(A, VALID))}, "thinking.think_start: token ids must be in"),
        ({"thinking": rule(forced_end=(STOP, END))}, "thinking.forced_end: must not contain a stop token"),
        ({"thinking": rule(implicit_ends=[(STOP,)])}, "thinking.implicit_ends: must not contain a stop token"),
    ],
)
def test_an_option_out_of_range_is_rejected_by_name(options, message):
    with pytest.raises(BadRequest, match=message):
        Constraint(**({"vocab_size": WIDTH, "stop_ids": [STOP], "valid_tokens": VALID} | options))


@pytest.mark.parametrize("ids", [(-1,), (A, -1), (-1, A), (WIDTH,), (A, WIDTH), (WIDTH, A)])
def test_every_token_of_a_delimiter_must_be_in_the_vocabulary(ids):
    with pytest.raises(BadRequest, match=r"think_start: .*token ids (>= 0|must be in 0\.\.)"):
        rule(think_start=ids)


@pytest.mark.parametrize(
    "grammar", [lambda: regex_grammar("ab[cd]"), lambda: compiled("grammar", 'root ::= "ab" [cd]').matcher()]
)
def test_the_row_of_a_rejected_token_is_filled_once(monkeypatch, grammar):
    grammar = grammar()
    filled, fill_row = [], grammar.fill_row
    monkeypatch.setattr(grammar, "fill_row", lambda row: filled.append(0) or fill_row(row))
    rows = rows_for("....")
    assert fill(constraint(grammar=grammar), [A, B, A, C], rows) == 2
    assert len(filled) == 3
    assert [tokens_in(row) for row in rows[:3]] == [{A}, {B}, {C, 100}]
