"""The complement of a pattern matches exactly the texts that the pattern does not match."""

import re

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.complement import complement
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern

letters = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", r"[^\\\"]", "é", "[a-c]"])
expressions = st.recursive(
    letters,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        )
    ),
    max_leaves=6,
)
anchored = st.builds("{}{}{}".format, st.sampled_from(["", "^"]), expressions, st.sampled_from(["", "$"]))
texts = st.text(st.sampled_from('abcx1 é\n"\\\u2028😀'), max_size=8)


@settings(max_examples=60, deadline=None)
@given(expressions=st.lists(anchored, min_size=1, max_size=2), asked=st.lists(texts, min_size=1, max_size=12))
@example(expressions=["^a|b$"], asked=["", "a", "cb", "ca", "bc"])
@example(expressions=["a?"], asked=["", "b"])
def test_every_text_matches_either_a_pattern_or_its_complement(expressions, asked):
    try:
        written = complement(tuple(expressions))
    except UnsupportedPattern:  # rejected because the complement has too many cases
        reject()
    for text in asked:
        # In ECMA-262, `$` matches only at the end, and there are two more line terminators than in Python.
        read = [each.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]") for each in expressions]
        matched = any(re.search(each, text) for each in read)
        assert matched != (written is not None and patterns.matches(written, text))


def test_a_pattern_that_matches_all_texts_has_no_complement():
    assert complement(("",)) is None
    assert complement(("^a", "^[^a]", "^$")) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [(r"^\p{L}$", "a Unicode class"), ("(a|b)*a(a|b){12}$", "of many cases"), ("(a{99}){99}", "of many cases")],
)
def test_a_pattern_without_a_short_complement_is_rejected(pattern, reason):
    with pytest.raises(UnsupportedPattern, match=reason):
        complement((pattern,))
