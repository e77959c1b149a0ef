"""Bursts: the loop waits for requests that are being admitted, and they wait while it prepares a round."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from tandemrt.runtime.requests.arrivals import Arrivals
from tests.waiting import PATIENCE_S, eventually

NEVER_S = 10 * PATIENCE_S


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def test_without_admissions_the_loop_does_not_wait() -> None:
    Arrivals(gather_s=NEVER_S, pause_s=NEVER_S).gather(lambda: 0, 1)


def test_the_loop_waits_until_the_last_request_is_admitted(threads: ThreadPoolExecutor) -> None:
    arrivals = Arrivals(gather_s=NEVER_S, pause_s=NEVER_S)
    with arrivals.admitting():
        with arrivals.admitting():
            gathered = threads.submit(arrivals.gather, lambda: 0, 1)
        time.sleep(0.01)
        assert not gathered.done()
    gathered.result(PATIENCE_S)


def test_the_loop_waits_for_no_more_than_it_needs(threads: ThreadPoolExecutor) -> None:
    arrivals, queued = Arrivals(gather_s=NEVER_S, pause_s=NEVER_S), [0]
    with arrivals.admitting():
        gathered = threads.submit(arrivals.gather, lambda: len(queued), 2)
        time.sleep(0.01)
        assert not gathered.done()
        queued.append(0)
        gathered.result(PATIENCE_S)


@pytest.mark.parametrize("limits", [{"gather_s": 0.01, "pause_s": NEVER_S}, {"gather_s": NEVER_S, "pause_s": 0.01}])
def test_a_slow_admission_delays_the_loop_for_a_bounded_time(limits: dict[str, float]) -> None:
    arrivals = Arrivals(**limits)
    with arrivals.admitting():
        arrivals.gather(lambda: 0, 1)


def test_a_growing_queue_lets_the_loop_wait_longer_than_a_pause() -> None:
    arrivals, queued = Arrivals(gather_s=NEVER_S, pause_s=0.05), count()
    with arrivals.admitting():
        arrivals.gather(lambda: next(queued), 200)
    assert next(queued) == 201


@pytest.mark.parametrize(
    ("busy", "lengths", "looks"),
    [(False, [1, 2], 1), (True, [0, 0], 2), (True, [0, 1, 2], 2), (True, [1, 2, 3, 3, 4], 4), (True, [8, 9, 10], 2)],
)
def test_a_queue_that_grows_between_two_admissions_is_looked_at_again(
    busy: bool, lengths: list[int], looks: int
) -> None:
    seen: list[int] = []

    def queued() -> int:
        seen.append(lengths[len(seen)])
        return seen[-1]

    Arrivals(gather_s=NEVER_S, pause_s=NEVER_S).gather(queued, 9, busy=busy)
    assert len(seen) == looks


def test_a_failed_admission_ends() -> None:
    arrivals = Arrivals(gather_s=NEVER_S, pause_s=NEVER_S)
    with pytest.raises(ValueError, match="bad"), arrivals.admitting():
        raise ValueError("bad")
    arrivals.gather(lambda: 0, 1)


def test_admissions_wait_while_the_loop_prepares(threads: ThreadPoolExecutor) -> None:
    arrivals, began = Arrivals(give_way_s=NEVER_S), threading.Event()

    def admit() -> None:
        with arrivals.admitting():
            began.set()

    with arrivals.preparing():
        admission = threads.submit(admit)
        assert not began.wait(0.01)
    admission.result(PATIENCE_S)


def test_a_long_step_delays_admissions_for_a_bounded_time() -> None:
    arrivals, admitted = Arrivals(give_way_s=0.01), threading.Event()

    def admit() -> None:
        with arrivals.admitting():
            admitted.set()

    with arrivals.preparing(), ThreadPoolExecutor(1) as executor:
        executor.submit(admit)
        assert eventually(admitted.is_set)


def test_a_listener_in_the_loops_thread_admits_at_once() -> None:
    arrivals = Arrivals(give_way_s=NEVER_S)
    with arrivals.preparing(), arrivals.admitting():
        pass


def test_the_first_request_waits_for_no_round() -> None:
    with ThreadPoolExecutor(1) as pool:  # not the thread of rounds
        admitted = Arrivals(give_way_s=10.0).admitting()
        pool.submit(admitted.__enter__).result(timeout=5.0)
