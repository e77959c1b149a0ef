"""Parallel work of one round in threads: results and exceptions arrive at the caller of each part."""

import threading
from collections.abc import Iterator
from functools import partial
from threading import Thread

import pytest

from tandemrt.engines.parallel.threads import begun, map_ahead
from tandemrt.runtime.workers.parallel import MAX_THREADS, ParallelWork
from tests.waiting import PATIENCE_S


@pytest.fixture
def parallel() -> Iterator[ParallelWork]:
    work = ParallelWork()
    yield work
    work.close()


def test_each_part_returns_its_result_or_raises_its_own_exception(parallel: ParallelWork) -> None:
    def raise_error() -> int:
        raise KeyboardInterrupt("of one")

    work = {key: (lambda key=key: 10 * key) for key in range(9)} | {4: raise_error}
    results = parallel.start(work)
    for key in range(9):
        if key == 4:
            with pytest.raises(KeyboardInterrupt, match="of one"):
                results[key]()
        else:
            assert results[key]() == 10 * key


def test_parts_run_concurrently_up_to_the_number_of_threads(parallel: ParallelWork) -> None:
    meeting = threading.Barrier(MAX_THREADS, timeout=30)
    results = parallel.start(dict.fromkeys(range(MAX_THREADS), meeting.wait))
    assert sorted(results[part]() for part in range(MAX_THREADS)) == list(range(MAX_THREADS))


def test_a_single_part_runs_in_the_calling_thread(parallel: ParallelWork) -> None:
    assert parallel.start({1: threading.current_thread})[1]() is threading.current_thread()
    assert parallel.start({}) == {}


def meet(meeting: threading.Barrier) -> Thread:
    meeting.wait()
    return threading.current_thread()


def test_rounds_share_the_threads_and_closing_ends_them(parallel: ParallelWork) -> None:
    seen: set[Thread] = set()
    for _ in range(5):
        meeting = threading.Barrier(MAX_THREADS, timeout=PATIENCE_S)
        parts = parallel.start(dict.fromkeys(range(MAX_THREADS), partial(meet, meeting)))
        seen.update(part() for part in parts.values())
    assert len(seen) == MAX_THREADS
    parallel.close()
    for thread in seen - {threading.current_thread()}:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_caller_does_the_work_if_no_thread_can_start(
    parallel: ParallelWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        results = parallel.start(dict.fromkeys(range(9), threading.current_thread))
        assert [results[key]() for key in range(9)] == [threading.current_thread()] * 9
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    results = parallel.start(dict.fromkeys(range(2), meeting.wait))
    assert {results[key]() for key in range(2)} == {0, 1}, "a thread is started again as soon as one can"


def test_a_part_that_no_thread_has_begun_is_done_by_the_caller(parallel: ParallelWork) -> None:
    hold = threading.Event()
    stuck = parallel.start(dict.fromkeys(range(MAX_THREADS), partial(hold.wait, PATIENCE_S)))
    results = parallel.start(dict.fromkeys(range(3), threading.current_thread))
    assert [results[key]() for key in range(3)] == [threading.current_thread()] * 3
    hold.set()
    assert all(wait() for wait in stuck.values())


def test_work_is_done_ahead_by_several_threads_and_arrives_in_order() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    drawn: list[int] = []

    def squared(number: int) -> int:
        meeting.wait()
        return number**2

    results = map_ahead(squared, (drawn.append(number) or number for number in range(20)), 2)
    assert next(results) == 0
    assert len(drawn) == 5, "two results a thread may wait for the caller"
    assert list(results) == [number**2 for number in range(1, 20)]


def test_work_ahead_raises_its_error_at_its_place_also_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    for _ in range(2):
        results = map_ahead(lambda number: 1 // (number - 2), range(5), 2)
        assert [next(results), next(results)] == [-1, -1]
        with pytest.raises(ZeroDivisionError):
            next(results)
        monkeypatch.setattr(Thread, "start", refuse)


def test_begun_work_runs_in_another_thread() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    work = begun(partial(meet, meeting))
    meeting.wait()
    assert work.result() is not threading.current_thread()
    assert work.result() is work.result()


def test_begun_work_runs_in_the_caller_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    assert begun(threading.current_thread).result() is threading.current_thread()


def test_begun_work_raises_at_the_caller_of_the_result() -> None:
    work = begun(partial(int, "no number"))
    with pytest.raises(ValueError, match="no number"):
        work.result()
