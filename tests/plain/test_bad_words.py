"""Bad words: no output contains one in any tokenization, and no other text is forbidden."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandemrt import SamplingParams
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest, InternalError
from tandemrt.runtime.constraints.bad_words import BadWords
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.plain.constraints import VOCABULARY as WIDE
from tests.plain.constraints import WIDTH, byte_tokens, regex_grammar, tokens_in
from tests.plain.constraints import constraint as over_bytes

TOKENS = (b"", b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"abab", b"c", "é".encode()[:1], "é".encode()[1:])
VOCABULARY = Vocabulary(TOKENS, frozenset([0]), len(TOKENS))

word = st.text("abcé", min_size=1, max_size=4)


def made(words: list[str], **options: object) -> Constraint:
    forbidden = BadWords([each.encode() for each in words], VOCABULARY, len(TOKENS))
    return Constraint(len(TOKENS), (), bad_words=forbidden, **options)  # type: ignore[arg-type]


@example(["abac", "ba"], [[3]])  # begins in an earlier word
@given(st.lists(word, min_size=1, max_size=3), st.lists(st.lists(st.integers(0, 10), max_size=5), max_size=5))
def test_a_row_refuses_exactly_the_tokens_that_complete_a_word(words: list[str], drafts: list[list[int]]) -> None:
    state, output = made(words), b""
    for draft in drafts:
        rows = np.zeros((len(draft) + 1, 1), np.int32)
        window = state.fill_rows(draft, MaskRows(rows), 0).tokens
        for at in range(len(window) + 1):
            text = output + b"".join(TOKENS[token] for token in window[:at])
            clean = {t for t, content in enumerate(TOKENS) if not any(w.encode() in text + content for w in words)}
            assert tokens_in(rows[at]) & set(range(len(TOKENS))) == clean
        assert state.commit(window).kept == window
        output += b"".join(TOKENS[token] for token in window)


def test_a_word_that_is_committed_all_the_same_is_an_error() -> None:
    state = made(["aba"])
    state.commit([3])
    with pytest.raises(InternalError, match="forbidden in phase"):
        state.commit([1])


def test_a_forced_end_is_written_whole_and_a_grammar_that_needs_the_word_ends() -> None:
    bytes_only = Vocabulary(tuple(bytes([i]) for i in range(256)), frozenset(), 256)
    forbidden = BadWords([b"so"], bytes_only, 256)
    end = tuple(byte_tokens("so</t>"))
    rule = ThinkingRule(tuple(byte_tokens("<t>")), (tuple(byte_tokens("</t>")),), end, budget=0, vocabulary=bytes_only)
    state = Constraint(256, (), prompt=byte_tokens("<t>"), thinking=rule, bad_words=forbidden)
    assert state.commit(list(end)).kept == list(end)
    stuck = over_bytes(grammar=regex_grammar("abc"), bad_words=BadWords([b"bc"], WIDE, WIDTH))
    stuck.commit(byte_tokens("ab"))
    assert stuck.allows_nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "bad_words.0: "),
        ([7], "bad_words.0: must be a valid string; got 7"),
        (["a"] * 257, "must have at most 256 strings; got 257"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[object], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams(bad_words=words)
    assert SamplingParams(bad_words="").bad_words == ()
    assert SamplingParams(bad_words="x").bad_words == ("x",)
