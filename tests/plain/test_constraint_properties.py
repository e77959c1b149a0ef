"""Properties of constraints: rows and states always equal those of a fresh replay, for random rules and drafts."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.constraints.transitions import Phase
from tests.plain.constraints import (
    STOP,
    UNREAD,
    VOCABULARY,
    allowed,
    byte_tokens,
    constraint,
    fill,
    joined_spans,
    json_grammar,
    regex_grammar,
    rows_for,
    tokens_in,
)

# A few token ids, so that delimiters overlap with themselves, with each other and with the grammar's text.
LETTERS = byte_tokens('ab{"')
SCHEMA = {"type": "object", "properties": {"ab": {"enum": ["ab", True, 12]}, "b": {"type": "boolean"}}}
GRAMMARS = {
    "none": lambda: None,
    "json": lambda: json_grammar(SCHEMA),
    "letters": lambda: regex_grammar(r"a[ab]*b\{?"),
    "short": lambda: regex_grammar("ab?"),
}

# Tests may run on a busy machine, so examples have no deadline.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

letter = st.sampled_from(LETTERS)
delimiter = st.lists(letter, min_size=1, max_size=3).map(tuple)


@st.composite
def rules(draw):
    ends = draw(st.lists(delimiter, min_size=1, max_size=2, unique=True))
    implicit = [end for end in draw(st.lists(delimiter, max_size=1)) if end not in ends]
    forced = (*draw(st.lists(letter, max_size=2)), *ends[0], *draw(st.lists(letter, max_size=2)))
    budget = draw(st.sampled_from([None, 0, 1, 2, 4]))
    return ThinkingRule(draw(delimiter), ends, forced, implicit, budget, vocabulary=VOCABULARY)


@st.composite
def requests(draw):
    grammar = draw(st.sampled_from(sorted(GRAMMARS)))
    options = {
        "prompt": draw(st.lists(letter, max_size=6)),
        "thinking": draw(st.none() | rules()),
        "min_tokens": draw(st.sampled_from([0, 0, 3])),
        "max_tokens": draw(st.sampled_from([None, None, 6])),
        "banned": draw(st.sampled_from([(), (), (ord("b"),)])),
    }
    return lambda: constraint(grammar=GRAMMARS[grammar](), **options)


def propose(data, state: Constraint, length: int) -> list[int]:
    """Return a draft that mostly follows the rows, and sometimes does not."""
    ahead, draft = state.fork(), []
    while len(draft) < length:
        legal = sorted(allowed(ahead) & {*LETTERS, *byte_tokens(': tru}12"'), STOP})
        stray = data.draw(st.integers(0, 9)) == 0
        if stray or not legal or ahead.finished:
            draft.append(data.draw(st.sampled_from([*LETTERS, STOP])))
            break
        draft.append(data.draw(st.sampled_from(legal)))
        ahead.commit(draft[-1:])
    return draft + data.draw(st.lists(letter, max_size=2))


def check_fast_forward(data, make, state: Constraint, history: list[int], draft: list[int]) -> None:
    """Check that fast-forward tokens replace illegal and missing drafts, and with override all drafts after them."""
    most, overrule = data.draw(st.integers(0, 7)), data.draw(st.booleans())
    rows = rows_for(range(max(len(draft), most)))
    window = state.fill_rows(draft, MaskRows(rows), 0, limit=most, override=overrule)
    replay = make()
    for token in history:
        replay.commit([token])
    assert state.fast_forward_tokens(most) == replay.fast_forward_tokens(most)
    for at, token in enumerate(window.tokens):
        row = allowed(replay)
        assert tokens_in(rows[at]) == row
        assert token in row
        must = [token] if len(row) == 1 else replay.fast_forward_tokens(1)
        drafted = draft[at] if at < len(draft) and window.tokens[:at] == draft[:at] else None
        if at not in window.fast_forward:
            assert token == drafted
            assert not (overrule and at < most and len(row) == 1)
        else:
            assert at < most
            assert must  # the text has one tokenization, or several
            assert overrule or drafted not in row
        replay.commit([token])
    if len(window.tokens) < most and not replay.finished:
        assert not replay.fast_forward_tokens(1)


@settings(max_examples=100, **patient)
@given(make=requests(), data=st.data())
def test_a_run_of_ordinary_tokens_equals_its_tokens_one_by_one(make, data):
    state = make()
    draft = propose(data, state, data.draw(st.integers(0, 4)))
    state.commit(draft[: fill(state, draft, rows_for(draft))])
    rows, begun = state._rows, state._state
    tokens = data.draw(st.lists(st.sampled_from([*LETTERS, STOP]), max_size=8))
    shared, after = rows.shared(begun), begun
    count = 0 if shared is None else state._lookahead.ordinary_run(begun, tokens)
    for token in tokens[:count]:
        assert rows.shared(after) is shared
        after, updates = state._transitions.step(after, token)
        assert [(each.role, each.undecided) for each in updates] == [(begun.default_role, 0)]
    assert not count or after == state._lookahead.after_run(begun, count)


@settings(max_examples=150, **patient)
@given(make=requests(), data=st.data())
def test_every_row_of_a_draft_window_equals_the_row_of_a_fresh_replay(make, data):
    """`fill_rows` leaves no trace, and `commit` accepts any prefix that the rows allow."""
    state, history, commits = make(), [], []
    for _ in range(data.draw(st.integers(1, 5))):
        draft = propose(data, state, data.draw(st.integers(0, 5)))
        rows = rows_for(draft)
        usable = fill(state, draft, rows)
        again = rows_for(draft)
        assert fill(state, draft, again) == usable
        check_fast_forward(data, make, state, history, draft)
        assert (rows == again).all()
        for index in range(usable + 1):
            replay = make()
            for token in (*history, *draft[:index]):
                replay.commit([token])
            expected = rows_for([])
            fill(replay, [], expected)
            assert tokens_in(rows[index]) == tokens_in(expected[0])
            if index < usable:
                assert draft[index] in tokens_in(rows[index])
            elif usable < len(draft):
                assert replay.finished or draft[index] not in tokens_in(rows[index])
        assert (rows[usable + 1 :] == UNREAD).all()
        taken = draft[: data.draw(st.integers(0, usable))]
        bonus = sorted(tokens_in(rows[len(taken)]) & {*LETTERS, *byte_tokens(": t12"), STOP})
        if bonus and not state.finished:
            taken.append(data.draw(st.sampled_from(bonus)))
        commit = state.commit(taken)
        commits.append(commit)
        assert commit.kept == taken[: len(commit.kept)]
        assert commit.finish or commit.kept == taken
        history += commit.kept
        if commit.finish:
            break
    emitted = [token for _, tokens in joined_spans(commits) for token in tokens]
    ending = [commits[-1].stop_token] if commits[-1].stop_token is not None else []
    if state.finished:
        assert [*emitted, *ending] == history
    else:
        assert emitted == history[: len(emitted)]


@settings(max_examples=150, **patient)
@given(make=requests(), data=st.data())
def test_commit_raises_exactly_for_tokens_that_the_row_masks(make, data):
    state = make()
    for token in data.draw(st.lists(st.sampled_from([*LETTERS, STOP]), max_size=8)):
        if state.finished:
            return
        row = allowed(state)
        if token in row:
            state.commit([token])
        else:
            with pytest.raises(InternalError):
                state.commit([token])
            assert allowed(state) == row


@settings(max_examples=100, **patient)
@given(make=requests(), data=st.data())
def test_a_fork_does_not_change_its_original(make, data):
    state = make()
    for token in propose(data, state, 3):
        if token in allowed(state) and not state.finished:
            state.commit([token])
    before, fork = allowed(state), state.fork()
    for token in propose(data, fork, 4):
        if token in allowed(fork) and not fork.finished:
            fork.commit([token])
    assert allowed(state) == before


# Reference: the thinking rule without incremental state. It reads the whole text anew for every row.


@dataclass
class Reading:
    thinking: bool = False
    since: list[int] = field(default_factory=list)  # tokens since the last delimiter that counted
    forced: int | None = None  # number of emitted tokens of the forced end


def read(rule: ThinkingRule, prompt: list[int], output: list[int]) -> Reading:
    state, seen = Reading(), []
    for index, token in enumerate([*prompt, *output]):
        in_prompt = index < len(prompt)
        if state.forced is not None and not in_prompt:
            state.forced += 1
            if state.forced == len(rule.forced_end):
                state, seen = Reading(), []
            continue
        seen.append(token)
        state.since.append(token)
        explicit = any(tuple(seen[-len(end) :]) == end for end in rule.think_ends)
        implicit = any(tuple(seen[-len(end) :]) == end for end in rule.implicit_ends)
        start = tuple(seen[-len(rule.think_start) :]) == rule.think_start
        if state.thinking and (explicit or implicit):
            state, seen = Reading(), []
        elif start and (in_prompt or not state.thinking):
            state, seen = Reading(thinking=True), []
        elif explicit and in_prompt:
            state, seen = Reading(), []
        spent = state.thinking and rule.budget is not None and len(state.since) >= rule.budget
        if spent and index >= len(prompt) - 1:
            state.forced = 0
    return state


@settings(max_examples=200, **patient)
@given(rule=rules(), prompt=st.lists(letter, min_size=1, max_size=8), data=st.data())
def test_reasoning_blocks_equal_those_of_the_reference_reader(rule, prompt, data):
    """In every block: exactly N reasoning tokens, then the whole forced end."""
    state, output = constraint(thinking=rule, prompt=prompt), []
    for _ in range(data.draw(st.integers(0, 12))):
        expected = read(rule, prompt, output)
        row = allowed(state)
        if expected.forced is not None:
            assert row == {rule.forced_end[expected.forced]}
            assert state.phase is Phase.FORCING
        else:
            assert (state.phase is Phase.THINKING) == expected.thinking
            assert (STOP in row) == (not expected.thinking)
        token = data.draw(st.sampled_from(sorted(row & set(LETTERS))))
        state.commit([token])
        output.append(token)


@settings(max_examples=100, **patient)
@given(make=requests(), data=st.data())
def test_tokens_that_are_committed_at_once_have_the_roles_of_tokens_one_by_one(make, data):
    alone, tokens, commits = make(), [], []
    for _ in range(data.draw(st.integers(1, 12))):
        row = sorted(allowed(alone) & {*LETTERS, *byte_tokens(': tru}12"'), STOP})
        if alone.finished or not row:
            break
        tokens.append(data.draw(st.sampled_from(row)))
        commits.append(alone.commit(tokens[-1:]))
    assert joined_spans([make().commit(tokens)]) == joined_spans(commits)
