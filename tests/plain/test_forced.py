"""Forced tokens: what a grammar, a marker or a budget leaves no choice about is known before a model is asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.plain.constraints import (
    CALL,
    END,
    MERGED,
    STOP,
    THINK,
    VOCABULARY,
    constraint,
    json_grammar,
    regex_grammar,
    rows_for,
    spell,
)

NAMED = {"type": "object", "properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"]}
FIXED = {**NAMED, "additionalProperties": False}
HEAD = [MERGED[b'{"'], *spell("name"), MERGED[b'":'], *spell(' "')]


def filled(state, draft, most, **how):
    return state.fill(draft, MaskRows(rows_for(range(max(most, len(draft))))), 0, most=most, **how)


def test_the_text_of_a_grammar_goes_on_with_what_it_must() -> None:
    state = constraint(grammar=json_grammar(FIXED))
    assert state.forced(20) == HEAD
    assert state.forced(3) == HEAD[:3]
    state.commit([*HEAD, *spell("x")])
    assert state.forced(20)[:1] in ([MERGED[b'"}']], spell('"'))


def test_a_spent_budget_is_followed_by_its_forced_end_and_that_by_the_grammar() -> None:
    rule = ThinkingRule((THINK,), ((END,),), (*spell("so"), END), budget=2, vocabulary=VOCABULARY)
    state = constraint(prompt=[THINK], thinking=rule, grammar=json_grammar(FIXED))
    assert (state.may_force(1), state.may_force(2), state.forced(9)) == (False, True, [])
    state.commit(spell("ab"))
    assert state.forced(40) == [*spell("so"), END, *HEAD]


def test_a_marker_that_nothing_else_can_become_is_finished() -> None:
    rule = ThinkingRule((*spell("<"), THINK, CALL), ((END,),), (END,), vocabulary=VOCABULARY)
    state = constraint(thinking=rule, grammar=json_grammar(FIXED))
    assert state.forced(9) == []  # the model may think, or answer
    state.commit(spell("<"))
    assert state.forced(9) == [THINK, CALL]


def test_forced_tokens_stand_in_front_of_drafts_between_and_behind_them() -> None:
    state = constraint(grammar=regex_grammar("ab[xy]cd[xy]ef"))
    assert filled(state, [], 9) == (spell("ab"), [0, 1])
    assert filled(state, spell("abx"), 9) == (spell("abxcd"), [3, 4])
    assert filled(state, spell("abq"), 9) == (spell("ab"), [])
    assert filled(state, spell("qbx"), 9) == (spell("ab"), [0, 1])  # what was drafted behind another token falls away
    assert filled(state, spell("abxcdy"), 20) == ([*spell("abxcdyef"), STOP], [6, 7, 8])
    assert filled(state, spell("abxcd"), 4) == (spell("abxcd"), [])


def test_a_text_that_is_too_complex_forces_nothing_and_filling_says_so(monkeypatch) -> None:
    """What follows is asked for all requests at once, rows are filled one by one: the others hear nothing."""
    grammar = regex_grammar("abc(d|e)")
    state = constraint(grammar=grammar)
    assert state.forced(3) == spell("abc")
    failed = grammar._matcher.deep_copy()
    failed.consume_token(ord("x"))
    monkeypatch.setattr(grammar, "_matcher", failed)
    monkeypatch.setattr(grammar, "_renew", lambda: None)
    assert state.forced(3) == []
    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        filled(state, [ord("a")], 1)


def test_without_room_nothing_is_forced() -> None:
    state = constraint(grammar=regex_grammar("abc"))
    assert filled(state, [], 0) == ([], [])
    assert filled(state, spell("ab"), 2) == (spell("ab"), [])


def test_where_forced_tokens_overrule_it_does_not_matter_what_was_drafted() -> None:
    """The rejection rule: a position is drawn or forced because of what is in front of it, never because of itself."""
    state = constraint(grammar=regex_grammar('[xy]":[xy]'))
    merged, apart = MERGED[b'":'], spell('":')
    for draft in ([*spell("x"), merged], [*spell("x"), *apart], [*spell("x"), *spell("qq")]):
        tokens, forced = filled(state, draft, 2, overrule=True)
        assert (tokens[:2], forced) == ([*spell("x"), merged], [1])
    assert filled(state, [*spell("x"), *apart], 3) == ([*spell("x"), *apart], [])  # they are as good a spelling


def test_one_allowed_token_is_forced_without_any_grammar() -> None:
    state = constraint(allowed=[7], max_tokens=3)
    assert filled(state, [], 8) == ([7, 7, 7], [0, 1, 2])


@given(st.sets(st.integers(0, 200), max_size=3))
def test_the_only_token_of_a_row_is_found(tokens: set[int]) -> None:
    row = np.zeros(7, np.int32)
    for token in tokens:
        bitmask.allow(row, token)
    assert bitmask.only(row) == (next(iter(tokens)) if len(tokens) == 1 else None)


@pytest.mark.parametrize(("text", "spelled"), [(b"ab", [1, 2]), (b"abc", [3, 4]), ("é".encode()[:1], []), (b"zz", [])])
def test_a_text_is_spelled_as_the_tokenizer_would_where_it_spells_it(text: bytes, spelled: list[int]) -> None:
    encode = {"ab": [1, 2], "abc": [5], "zz": [1]}.__getitem__  # 5 spells something else
    vocabulary = Vocabulary((b"", b"a", b"b", b"ab", b"c", b"x"), frozenset(), 6, encode)
    assert vocabulary.spelling(text) == spelled
    assert VOCABULARY.spelling(b'{"') == [MERGED[b'{"']]
