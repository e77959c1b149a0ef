"""What a draft was not fed: rounds without drafts leave it for later, and no more of it than there is room for."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.round.round import Round

ROOM = 5
ROUNDS = st.lists(st.tuples(st.integers(0, ROOM - 1), st.booleans(), st.integers(0, ROOM)))


def of_window(window: int) -> Round:
    return Round({}, 1, window, filters=False, rules=frozenset())


def running(tokens: int, prefill_end: int = 0) -> Any:
    return SimpleNamespace(tokens=[0] * tokens, prefill_end=prefill_end)


@given(ROUNDS)
def test_no_more_waits_than_there_is_room_for_and_what_is_held_was_fed(rounds: list[tuple[int, bool, int]]) -> None:
    """Rounds with a window, whether they draft, and how many tokens they emit at most."""
    backlog = Backlog(ROOM)
    backlog.join()
    text, waiting = 10, 1  # what the host knows at a round's end, and what is in no cache
    for window, drafts, most in rounds:
        this = of_window(window)
        waits = not (window and drafts) and backlog.may_wait(this)
        assert not (waits and window), "what waits is kept token by token"
        if window and drafts:
            backlog.feed()
        waiting = waiting if waits else 0
        assert backlog.held(running(text)) <= text - waiting
        emitted = min(most, window + 1)
        assert backlog.emitted(this) == (not waits)
        waiting, text = waiting + emitted, text + emitted
        assert waiting <= ROOM


def test_rounds_without_drafts_share_a_run() -> None:
    backlog, plain = Backlog(ROOM), of_window(0)
    feeds = []
    for _ in range(100):
        feeds.append(not backlog.may_wait(plain))
        backlog.emitted(plain)
    assert sum(feeds) == 100 // ROOM


def test_of_a_prompt_everything_is_held() -> None:
    backlog, plain = Backlog(ROOM), of_window(0)
    assert backlog.may_wait(plain)
    assert backlog.held(running(12, prefill_end=11)) == 11
