"""Workers are shared: whatever one client sends, another one's work is begun."""

import threading
from collections import Counter
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.errors import Closed
from tandemrt.runtime.fair import FairExecutor, Shares
from tests.waiting import PATIENCE_S

steps = st.one_of(st.sampled_from(["", "a", "b", "c"]), st.just(1), st.just(-1))


@given(workers=st.integers(1, 4), script=st.lists(steps, max_size=60))
def test_whoever_has_the_fewest_workers_is_next_and_one_is_left_to_others(workers: int, script: list) -> None:
    shares: Shares[int] = Shares(workers)
    waiting: list[tuple[str, int]] = []
    working: list[str] = []
    for number, step in enumerate(script):
        if isinstance(step, str):
            shares.add(step, number)
            waiting.append((step, number))
        elif step == -1 and working:
            shares.done(working.pop(0))
        elif step == 1 and len(working) < workers:
            have = Counter(working)
            able = [each for each in waiting if not each[0] or have[each[0]] < max(1, workers - 1)]
            expected = min(able, key=lambda each: (have[each[0]], each[1]), default=None)
            assert shares.take() == expected
            if expected is not None:
                waiting.remove(expected)
                working.append(expected[0])
        assert len(shares) == len(waiting)


@pytest.fixture
def held() -> threading.Event:
    return threading.Event()


def test_a_client_that_holds_its_workers_keeps_one_from_nobody(held: threading.Event) -> None:
    executor = FairExecutor(2, "test")
    flood = [executor.submit("attacker", held.wait, PATIENCE_S) for _ in range(5)]
    assert executor.submit("victim", int, "7").result(PATIENCE_S) == 7
    assert not any(future.done() for future in flood)
    held.set()
    assert all(future.result(PATIENCE_S) for future in flood)
    executor.shutdown(wait=True)


def test_what_was_not_begun_is_told_when_it_is_shut_down(held: threading.Event) -> None:
    executor = FairExecutor(1, "test")
    begun, waiting = executor.submit("", held.wait, PATIENCE_S), executor.submit("", int)
    threading.Timer(0.05, held.set).start()
    executor.shutdown(wait=True)
    assert begun.result() is True
    with pytest.raises(Closed):
        waiting.result(0)
    with pytest.raises(Closed):
        executor.submit("", int)


def test_what_nobody_waits_for_is_not_begun_and_what_is_raised_is_told(held: threading.Event) -> None:
    executor = FairExecutor(1, "test")
    begun, gone = executor.submit("", held.wait, PATIENCE_S), executor.submit("", pytest.fail)
    failing: Future[int] = executor.submit("", int, "x")
    assert gone.cancel()
    held.set()
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(PATIENCE_S)
    assert begun.result() is True
    executor.shutdown(wait=True)
