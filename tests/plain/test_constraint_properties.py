"""Whatever the rule, the draft and what was taken of it: rows and states are those of a fresh replay."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.errors import InternalError
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.state import Phase
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.plain.constraints import (
    STOP,
    UNREAD,
    VOCABULARY,
    allowed,
    constraint,
    fill,
    json_grammar,
    pieces,
    regex_grammar,
    rows_for,
    spell,
    tokens_in,
)

# A few token ids, so that markers overlap with themselves, with each other and with the grammar's text.
LETTERS = spell('ab{"')
SCHEMA = {"type": "object", "properties": {"ab": {"enum": ["ab", True, 12]}, "b": {"type": "boolean"}}}
GRAMMARS = {
    "none": lambda: None,
    "json": lambda: json_grammar(SCHEMA),
    "letters": lambda: regex_grammar(r"a[ab]*b\{?"),
    "short": lambda: regex_grammar("ab?"),
}

# A machine shared with other work is slow at times; that says nothing about the constraint.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

letter = st.sampled_from(LETTERS)
marker = st.lists(letter, min_size=1, max_size=3).map(tuple)


@st.composite
def rules(draw):
    ends = draw(st.lists(marker, min_size=1, max_size=2, unique=True))
    implicit = [end for end in draw(st.lists(marker, max_size=1)) if end not in ends]
    forced = (*draw(st.lists(letter, max_size=2)), *ends[0], *draw(st.lists(letter, max_size=2)))
    budget = draw(st.sampled_from([None, 0, 1, 2, 4]))
    return ThinkingRule(draw(marker), ends, forced, implicit, budget, vocabulary=VOCABULARY)


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
    """A draft that mostly follows the rows, and sometimes does not."""
    ahead, draft = state.fork(), []
    while len(draft) < length:
        legal = sorted(allowed(ahead) & {*LETTERS, *spell(': tru}12"'), STOP})
        stray = data.draw(st.integers(0, 9)) == 0
        if stray or not legal or ahead.finished:
            draft.append(data.draw(st.sampled_from([*LETTERS, STOP])))
            break
        draft.append(data.draw(st.sampled_from(legal)))
        ahead.commit(draft[-1:])
    return draft + data.draw(st.lists(letter, max_size=2))


def hold_what_follows(data, make, state: Constraint, history: list[int], draft: list[int]) -> None:
    """Forced tokens take the place of refused and missing ones, and where they overrule, of all that they follow."""
    most, overrule = data.draw(st.integers(0, 7)), data.draw(st.booleans())
    rows = rows_for(range(max(len(draft), most)))
    window = state.fill(draft, MaskRows(rows), 0, most=most, overrule=overrule)
    replay = make()
    for token in history:
        replay.commit([token])
    assert state.forced(most) == replay.forced(most)
    for at, token in enumerate(window.tokens):
        row = allowed(replay)
        assert tokens_in(rows[at]) == row
        assert token in row
        must = [token] if len(row) == 1 else replay.forced(1)
        drafted = draft[at] if at < len(draft) and window.tokens[:at] == draft[:at] else None
        if at not in window.forced:
            assert token == drafted
            assert not (overrule and at < most and len(row) == 1)
        else:
            assert at < most
            assert must  # of a text that spells itself in one way, or in several
            assert overrule or drafted not in row
        replay.commit([token])
    if len(window.tokens) < most and not replay.finished:
        assert not replay.forced(1)


@settings(max_examples=100, **patient)
@given(make=requests(), data=st.data())
def test_a_plain_run_leads_where_its_tokens_lead_one_by_one(make, data):
    state = make()
    draft = propose(data, state, data.draw(st.integers(0, 4)))
    state.commit(draft[: fill(state, draft, rows_for(draft))])
    phases, begun = state._phases, state._state
    tokens = data.draw(st.lists(st.sampled_from([*LETTERS, STOP]), max_size=8))
    count, after = phases.plain_run(begun, tokens), begun
    for token in tokens[:count]:
        assert phases.shared_row(after) is phases.shared_row(begun)
        after, told = phases.step(after, token)
        assert [(each.kind, each.left) for each in told] == [(phases.plain_kind(begun), 0)]
    assert not count or after == phases.lengthened(begun, count)


@settings(max_examples=250, **patient)
@given(make=requests(), data=st.data())
def test_every_row_of_every_window_is_the_row_of_a_fresh_replay(make, data):
    """G1, G6, G7, G10, S10: and `fill` leaves no trace, and `commit` takes any prefix the rows allow."""
    state, history, commits = make(), [], []
    for _ in range(data.draw(st.integers(1, 5))):
        draft = propose(data, state, data.draw(st.integers(0, 5)))
        rows = rows_for(draft)
        usable = fill(state, draft, rows)
        again = rows_for(draft)
        assert fill(state, draft, again) == usable
        hold_what_follows(data, make, state, history, draft)
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
        bonus = sorted(tokens_in(rows[len(taken)]) & {*LETTERS, *spell(": t12"), STOP})
        if bonus and not state.finished:
            taken.append(data.draw(st.sampled_from(bonus)))
        commit = state.commit(taken)
        commits.append(commit)
        assert commit.kept == taken[: len(commit.kept)]
        assert commit.finish or commit.kept == taken
        history += commit.kept
        if commit.finish:
            break
    told = [token for _, tokens in pieces(commits) for token in tokens]
    ending = [commits[-1].stop_token] if commits[-1].stop_token is not None else []
    if state.finished:
        assert [*told, *ending] == history
    else:
        assert told == history[: len(told)]


@settings(max_examples=150, **patient)
@given(make=requests(), data=st.data())
def test_commit_raises_exactly_where_the_row_has_no_bit(make, data):
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
def test_a_fork_goes_its_own_way(make, data):
    state = make()
    for token in propose(data, state, 3):
        if token in allowed(state) and not state.finished:
            state.commit([token])
    before, fork = allowed(state), state.fork()
    for token in propose(data, fork, 4):
        if token in allowed(fork) and not fork.finished:
            fork.commit([token])
    assert allowed(state) == before


# The thinking rules again, as one would write them without any state: the whole text is read anew for every row.


@dataclass
class Reading:
    thinking: bool = False
    since: list[int] = field(default_factory=list)  # tokens since the last marker that counted
    forced: int | None = None  # tokens of the forced end that are out


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
        explicit = any(tuple(seen[-len(end) :]) == end for end in rule.ends)
        implicit = any(tuple(seen[-len(end) :]) == end for end in rule.implicit_ends)
        start = tuple(seen[-len(rule.start) :]) == rule.start
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


@settings(max_examples=400, **patient)
@given(rule=rules(), prompt=st.lists(letter, min_size=1, max_size=8), data=st.data())
def test_blocks_are_those_of_reading_the_whole_text_for_every_row(rule, prompt, data):
    """G12, and rule 5 to the letter: exactly N tokens, then the whole forced end, again in every block."""
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
