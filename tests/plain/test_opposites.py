"""The opposite of a pattern is found in the very texts in which the pattern is not."""

import re

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.opposites import opposite
from tandemrt.runtime.grammars.pattern_parts import Unreadable

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
@given(found=st.lists(anchored, min_size=1, max_size=2), asked=st.lists(texts, min_size=1, max_size=12))
@example(found=["^a|b$"], asked=["", "a", "cb", "ca", "bc"])
@example(found=["a?"], asked=["", "b"])
def test_every_text_has_a_pattern_in_it_or_fits_the_opposite(found, asked):
    try:
        written = opposite(tuple(found))
    except Unreadable:  # it has too many cases, which is a refusal
        reject()
    for text in asked:
        # ECMA-262 ends a text where it ends, and knows two more line ends than Python.
        read = [each.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]") for each in found]
        held = any(re.search(each, text) for each in read)
        assert held != (written is not None and patterns.matches(written, text))


def test_what_matches_all_texts_has_no_opposite():
    assert opposite(("",)) is None
    assert opposite(("^a", "^[^a]", "^$")) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [(r"^\p{L}$", "a class of Unicode"), ("(a|b)*a(a|b){12}$", "of many cases"), ("(a{99}){99}", "of many cases")],
)
def test_what_has_no_short_opposite_is_refused(pattern, reason):
    with pytest.raises(Unreadable, match=reason):
        opposite((pattern,))
