"""Fast-forward tokens: tokens without an alternative, from a grammar, a delimiter or a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars import bitmask
from tests.plain.constraints import (
    CALL,
    END,
    MERGED,
    STOP,
    THINK,
    VOCABULARY,
    byte_tokens,
    constraint,
    json_grammar,
    regex_grammar,
    rows_for,
)

NAMED = {"type": "object", "properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"]}
FIXED = {**NAMED, "additionalProperties": False}
HEAD = [MERGED[b'{"'], *byte_tokens("name"), MERGED[b'":'], *byte_tokens(' "')]


def fill_window(state, draft, most, **how):
    return state.fill_rows(draft, MaskRows(rows_for(range(max(most, len(draft))))), 0, limit=most, **how)


def test_a_grammar_fast_forwards_its_fixed_text() -> None:
    state = constraint(grammar=json_grammar(FIXED))
    assert state.fast_forward_tokens(20) == HEAD
    assert state.fast_forward_tokens(3) == HEAD[:3]
    state.commit([*HEAD, *byte_tokens("x")])
    assert state.fast_forward_tokens(20)[:1] in ([MERGED[b'"}']], byte_tokens('"'))


def test_the_forced_end_follows_a_spent_budget_and_the_grammar_follows_the_forced_end() -> None:
    rule = ThinkingRule((THINK,), ((END,),), (*byte_tokens("so"), END), budget=2, vocabulary=VOCABULARY)
    state = constraint(prompt=[THINK], thinking=rule, grammar=json_grammar(FIXED))
    assert (state.may_fast_forward(1), state.may_fast_forward(2), state.fast_forward_tokens(9)) == (False, True, [])
    state.commit(byte_tokens("ab"))
    assert state.fast_forward_tokens(40) == [*byte_tokens("so"), END, *HEAD]


def test_a_delimiter_without_an_alternative_is_completed() -> None:
    rule = ThinkingRule((*byte_tokens("<"), THINK, CALL), ((END,),), (END,), vocabulary=VOCABULARY)
    state = constraint(thinking=rule, grammar=json_grammar(FIXED))
    assert state.fast_forward_tokens(9) == []  # the model may reason or answer
    state.commit(byte_tokens("<"))
    assert state.fast_forward_tokens(9) == [THINK, CALL]


def test_fast_forward_tokens_are_inserted_before_between_and_after_drafts() -> None:
    state = constraint(grammar=regex_grammar("ab[xy]cd[xy]ef"))
    assert fill_window(state, [], 9) == (byte_tokens("ab"), [0, 1])
    assert fill_window(state, byte_tokens("abx"), 9) == (byte_tokens("abxcd"), [3, 4])
    assert fill_window(state, byte_tokens("abq"), 9) == (byte_tokens("ab"), [])
    # Drafts after a replaced token are dropped.
    assert fill_window(state, byte_tokens("qbx"), 9) == (byte_tokens("ab"), [0, 1])
    assert fill_window(state, byte_tokens("abxcdy"), 20) == ([*byte_tokens("abxcdyef"), STOP], [6, 7, 8])
    assert fill_window(state, byte_tokens("abxcd"), 4) == (byte_tokens("abxcd"), [])


def test_a_too_complex_text_has_no_fast_forward_tokens_and_filling_raises(monkeypatch) -> None:
    """Fast-forward tokens are computed for all requests together, so an error there would fail all of them."""
    grammar = regex_grammar("abc(d|e)")
    state = constraint(grammar=grammar)
    assert state.fast_forward_tokens(3) == byte_tokens("abc")
    failed = grammar._matcher.deep_copy()
    failed.consume_token(ord("x"))
    monkeypatch.setattr(grammar, "_matcher", failed)
    monkeypatch.setattr(grammar, "_replace_matcher", lambda: None)
    assert state.fast_forward_tokens(3) == []
    with pytest.raises(BadRequest, match="the text so far makes the grammar too complex"):
        fill_window(state, [ord("a")], 1)


def test_a_limit_of_zero_tokens_inserts_no_fast_forward_token() -> None:
    state = constraint(grammar=regex_grammar("abc"))
    assert fill_window(state, [], 0) == ([], [])
    assert fill_window(state, byte_tokens("ab"), 2) == (byte_tokens("ab"), [])


def test_with_override_fast_forward_tokens_do_not_depend_on_the_drafts() -> None:
    """The rejection rule needs this: the kind of a position depends on earlier tokens only, never on its own draft."""
    state = constraint(grammar=regex_grammar('[xy]":[xy]'))
    merged, apart = MERGED[b'":'], byte_tokens('":')
    for draft in ([*byte_tokens("x"), merged], [*byte_tokens("x"), *apart], [*byte_tokens("x"), *byte_tokens("qq")]):
        tokens, forced = fill_window(state, draft, 2, override=True)
        assert (tokens[:2], forced) == ([*byte_tokens("x"), merged], [1])
    # An equally valid tokenization of the text.
    assert fill_window(state, [*byte_tokens("x"), *apart], 3) == ([*byte_tokens("x"), *apart], [])


def test_a_single_allowed_token_is_fast_forwarded_without_a_grammar() -> None:
    state = constraint(allowed=[7], max_tokens=3)
    assert fill_window(state, [], 8) == ([7, 7, 7], [0, 1, 2])


@given(st.sets(st.integers(0, 200), max_size=3))
def test_the_only_token_of_a_mask_row_is_found(tokens: set[int]) -> None:
    row = np.zeros(7, np.int32)
    for token in tokens:
        bitmask.allow(row, token)
    assert bitmask.only(row) == (next(iter(tokens)) if len(tokens) == 1 else None)


@pytest.mark.parametrize(("text", "expected"), [(b"ab", [1, 2]), (b"abc", [3, 4]), ("é".encode()[:1], []), (b"zz", [])])
def test_tokenize_uses_the_tokenizer_if_its_tokens_give_the_text(text: bytes, expected: list[int]) -> None:
    encode = {"ab": [1, 2], "abc": [5], "zz": [1]}.__getitem__  # token 5 is another text
    vocabulary = Vocabulary((b"", b"a", b"b", b"ab", b"c", b"x"), frozenset(), 6, encode)
    assert vocabulary.tokenize(text) == expected
    assert VOCABULARY.tokenize(b'{"') == [MERGED[b'{"']]
