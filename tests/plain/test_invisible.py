"""For a seed, the coupled rule emits what plain decoding emits: no draft, window or round changes a token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.plugins.reference import token_bitmask, verify_draft
from tests.plain.tiny_language import Language, speculate

VOCAB = 7
LANGUAGE = Language.random(VOCAB, masked=True, top_p=0.95)


def plain(seed, filters, length):
    """Decode token by token, without any draft."""
    text = [0, 0]
    for position in range(2, 2 + length):
        text += emitted(text, [], seed, filters, position)
    return text[2:]


def emitted(context, draft, seed, filters, position, length=None):
    text = [*context[-2:], *draft]
    in_vocab = np.clip(text, 0, VOCAB - 1)  # what a model would do with an id outside of it does not matter
    states = in_vocab[:-1], in_vocab[1:]
    logits = token_bitmask(LANGUAGE.target[states], LANGUAGE.mask[states])
    request = LANGUAGE.request | filters | {"seed": seed, "rule": "coupled"}
    usable = [len(draft) if length is None else length]
    tokens, count = verify_draft(
        logits[None], np.array([draft], np.int64).reshape(1, -1), usable, **request, position=position
    )
    return tokens[0, : count[0]].tolist()


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
    top_n_sigma=st.sampled_from([0, 0.3, 1.0, 1.7]),
    draft=st.lists(st.integers(-1, VOCAB), max_size=8),
    right=st.integers(0, 8),
    data=st.data(),
)
def test_emitted_tokens_are_a_prefix_of_the_plain_text(seed, temperature, top_n_sigma, draft, right, data):
    """Regression S11, one round: any draft, the first ``right`` tokens of it correct, of any usable length."""
    filters = {"temperature": temperature, "top_n_sigma": top_n_sigma}
    text = plain(seed, filters, 9)
    draft = text[: min(right, len(draft))] + draft[right:]
    length = data.draw(st.integers(0, len(draft)))
    tokens = emitted([0, 0], draft, seed, filters, 2, length)
    assert tokens == text[: len(tokens)]
    assert len(tokens) >= 1 + min(right, length)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**63 - 1), drafts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), max_size=6))
def test_a_discarded_round_leaves_no_trace(seed, drafts):
    """Regression S10: there is no generator to rewind; a round that is thrown away or repeated changes nothing."""
    text = [0, 0]
    for draft in drafts:
        emitted(text, draft[::-1], seed, {}, len(text))
        text += emitted(text, draft, seed, {}, len(text))
    assert text[2:] == plain(seed, {}, len(text))[: len(text) - 2]


def test_every_window_gives_the_same_text():
    """Regression S11: 2,000 seeds, windows of 0 to 8, drafts with the target's own noise."""
    texts = [speculate(LANGUAGE, rule="coupled", window=window, length=10, requests=2000).text for window in range(9)]
    assert all((text == texts[0]).all() for text in texts)


def test_the_rejection_rule_makes_no_such_promise():
    """Control: its distribution is exact, but its text per seed differs from autoregressive decoding."""
    texts = [speculate(LANGUAGE, rule="rejection", window=window, length=10, requests=200).text for window in (0, 4)]
    assert (texts[0] != texts[1]).any()
