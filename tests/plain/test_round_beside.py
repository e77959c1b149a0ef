"""Work of one round in several threads: each part is heard where it is asked for."""

import threading
from functools import partial
from threading import Thread

import pytest

from tandemrt.runtime.round.beside import MOST_THREADS, beside


def test_each_result_is_heard_and_what_one_raises_is_its_own() -> None:
    def fails() -> int:
        raise KeyboardInterrupt("of one")

    work = {key: (lambda key=key: 10 * key) for key in range(9)} | {4: fails}
    results = beside(work)
    for key in range(9):
        if key == 4:
            with pytest.raises(KeyboardInterrupt, match="of one"):
                results[key]()
        else:
            assert results[key]() == 10 * key


def test_parts_meet_one_another_in_as_many_threads_as_there_may_be() -> None:
    meeting = threading.Barrier(MOST_THREADS, timeout=30)
    results = beside(dict.fromkeys(range(MOST_THREADS), meeting.wait))
    assert sorted(results[part]() for part in range(MOST_THREADS)) == list(range(MOST_THREADS))


def test_one_part_alone_needs_no_thread() -> None:
    assert beside({1: threading.current_thread})[1]() is threading.current_thread()
    assert beside({}) == {}


def test_where_no_thread_can_be_had_whoever_asks_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    results = beside({key: partial(str, key) for key in range(9)})
    assert [results[key]() for key in range(9)] == [str(key) for key in range(9)]
