"""Drafts by lookup are what a search through the whole text would find."""

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.drafters.ngram import NgramDrafter, NgramIndex
from tandemrt.runtime.requests.slots import Round
from tests.plain.requests import make_running


def search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that occurs earlier, over and over."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                followed = tokens[end:]
                return [followed[at % len(followed)] for at in range(count)]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_lookup_in_a_growing_text_equals_a_search(parts: list[list[int]], shortest: int, more: int, count: int) -> None:
    tokens: list[int] = []
    index = NgramIndex(tokens, range(shortest + more, shortest - 1, -1))
    for part in parts:
        tokens += part
        assert index.lookup(count) == search(tokens, shortest, shortest + more, count)
        following = part[:2]
        drafted = index.lookup(count, following)
        assert drafted == search_after(tokens, following, shortest, shortest + more, count)


def search_after(tokens: list[int], following: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The same with ``following`` after the text."""
    text = tokens + following
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(text) and tokens[end - size : end] == text[len(text) - size :]:
                followed = tokens[end:]
                return [followed[at % len(followed)] for at in range(count)]
    return []


def test_lookup_continues_a_periodic_text_beyond_its_end() -> None:
    tokens = [1, 2, 3, 1, 2, 3]
    assert NgramIndex(tokens, range(3, 1, -1)).lookup(7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramIndex([5, 5, 5], range(3, 1, -1)).lookup(4) == [5, 5, 5, 5]


def test_lookup_continues_after_fast_forward_tokens() -> None:
    cpu = torch.device("cpu")
    buffers = RoundBuffers(slots=1, window=4, vocab=256, length=64, chunk=8, dtype=torch.float32, device=cpu)
    drafter = NgramDrafter(buffers, window=4, shortest=1, longest=2)
    running = make_running(prompt=[1, 2, 3, 1, 5, 6, 1])
    drafter.join(running)
    round_ = Round({0: running}, 1, 4, filters=False, rules=frozenset(), fast_forward={0: [2]})
    assert drafter.window_needed(round_) == 4
    drafter.propose(round_)
    assert buffers.draft_tokens.view(1, 4).tolist() == [[2, 3, 1, 5]]
