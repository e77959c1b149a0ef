"""The backlog of a draft: rounds without drafts leave emitted tokens for later, within its room."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.requests.round import Round

ROOM = 5
ROUNDS = st.lists(st.tuples(st.integers(0, ROOM - 1), st.booleans(), st.integers(0, ROOM)))


def of_window(window: int) -> Round:
    return Round({}, 1, window, needs_probs=False, rules=frozenset())


def running(tokens: int, prefill_end: int = 0) -> Any:
    return SimpleNamespace(tokens=[0] * tokens, prefill_end=prefill_end)


@given(ROUNDS)
def test_a_backlog_keeps_its_capacity_and_cached_tokens_are_processed(
    rounds: list[tuple[int, bool, int]],
) -> None:
    """Rounds with a window, whether they draft, and how many tokens they emit at most."""
    backlog = Backlog(ROOM)
    backlog.join()
    text, waiting = 10, 1  # tokens that the host has at a round's end, and those not in the cache
    for window, drafts, most in rounds:
        round_ = of_window(window)
        waits = not (window and drafts) and backlog.defer(round_)
        assert not (waits and window), "what waits is kept token by token"
        if window and drafts:
            backlog.mark_processed()
        waiting = waiting if waits else 0
        assert backlog.cached_tokens(running(text)) <= text - waiting
        emitted = min(most, window + 1)
        assert backlog.emitted(round_) == (not waits)
        waiting, text = waiting + emitted, text + emitted
        assert waiting <= ROOM


def test_rounds_without_drafts_share_a_run() -> None:
    backlog, plain = Backlog(ROOM), of_window(0)
    feeds = []
    for _ in range(100):
        feeds.append(not backlog.defer(plain))
        backlog.emitted(plain)
    assert sum(feeds) == 100 // ROOM


def test_all_tokens_of_a_prompt_count_as_cached() -> None:
    backlog, plain = Backlog(ROOM), of_window(0)
    assert backlog.defer(plain)
    assert backlog.cached_tokens(running(12, prefill_end=11)) == 11
