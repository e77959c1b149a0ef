"""When the operating system refuses a thread, the caller gets an error and the next request works."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.grammars.library import GrammarLibrary
from tandemrt.runtime.servers.triton.send_queue import SendQueue
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.fair import FairExecutor
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
from tandemrt.runtime.workers.threads import run_in_thread
from tests.plain.constraints import STOP, VOCABULARY, compiled_by
from tests.waiting import PATIENCE_S

Refuse = Callable[[int], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """A function that makes the next ``count`` starts of a thread fail."""
    start, left = threading.Thread.start, 0

    def refusing(thread: threading.Thread) -> None:
        nonlocal left
        if left:
            left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    def set_count(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return set_count


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_executor_fails_the_task_and_runs_later_ones(refuse: Refuse, count: int) -> None:
    executor = FairExecutor(2, "test")
    refuse(count)
    for _ in range(count):
        with pytest.raises(InternalError, match="a thread could not start: can't start new thread"):
            executor.submit(UNNAMED, int, "7").result(PATIENCE_S)
    ran: list[int] = []
    assert [executor.submit(UNNAMED, int, text).result(PATIENCE_S) for text in "89"] == [8, 9]
    executor.submit(UNNAMED, ran.append, 1).result(PATIENCE_S)
    executor.shutdown(wait=True)
    assert ran == [1]


def test_an_executor_never_runs_a_task_that_it_failed(refuse: Refuse, caplog: pytest.LogCaptureFixture) -> None:
    executor, ran = FairExecutor(1, "test"), list[int]()
    refuse(1)
    failed = executor.submit(UNNAMED, ran.append, 1)
    assert executor.submit(UNNAMED, len, "ab").result(PATIENCE_S) == 2
    executor.shutdown(wait=True)
    assert isinstance(failed.exception(), InternalError)
    assert ran == []
    assert caplog.records == []


@pytest.mark.parametrize("client", [UNNAMED, Client("a"), Client(user="a")])
def test_tasks_without_a_thread_of_their_own_run_once_and_in_order(
    refuse: Refuse, caplog: pytest.LogCaptureFixture, client: Client
) -> None:
    executor, hold, begun, ran = FairExecutor(2, "test"), threading.Event(), threading.Event(), list[int]()
    executor.submit(UNNAMED, lambda: (begun.set(), hold.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    refuse(3)
    refused = [executor.submit(client, ran.append, number) for number in range(3)]
    hold.set()
    for task in refused:
        task.result(PATIENCE_S)
    later = [executor.submit(client, ran.append, number) for number in range(3, 6)]
    for task in later:
        task.result(PATIENCE_S)
    executor.shutdown(wait=True)
    assert ran[:3] == [0, 1, 2]
    assert sorted(ran) == list(range(6))
    assert caplog.records == []


def test_an_executor_without_a_second_thread_runs_the_task_in_the_first(refuse: Refuse) -> None:
    executor, hold, begun = FairExecutor(2, "test"), threading.Event(), threading.Event()
    first = executor.submit(UNNAMED, lambda: (begun.set(), hold.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    refuse(1)
    second = executor.submit(UNNAMED, int, "7")
    assert not second.done()
    hold.set()
    assert second.result(PATIENCE_S) == 7
    assert first.result(PATIENCE_S)
    assert executor.submit(UNNAMED, int, "8").result(PATIENCE_S) == 8
    executor.shutdown(wait=True)


@pytest.mark.parametrize("count", [1, 2])
def test_a_grammar_without_a_thread_fails_and_the_same_grammar_compiles_later(refuse: Refuse, count: int) -> None:
    library, structured = GrammarLibrary(VOCABULARY, [STOP]), StructuredOutputs(regex="[a-c]+")
    refuse(count)
    for _ in range(count):
        with pytest.raises(InternalError, match="a thread could not start"):
            compiled_by(library, structured).result(PATIENCE_S)
    assert compiled_by(library, structured).result(PATIENCE_S).matcher(None) is not None
    library.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_pool_rejects_the_task_and_runs_later_ones(refuse: Refuse, count: int) -> None:
    pool = ProcessPool(processes=2)
    refuse(count)
    for _ in range(count):
        with pytest.raises(InternalError, match="length: a thread could not start"):
            pool.submit(UNNAMED, "length", PATIENCE_S, len, "ab")
    assert pool.submit(UNNAMED, "length", PATIENCE_S, len, "abc").result(PATIENCE_S) == 3
    pool.close()


def test_a_process_pool_without_a_second_thread_runs_the_task_in_the_first(refuse: Refuse) -> None:
    pool = ProcessPool(processes=2)
    slow = pool.submit(UNNAMED, "sleep", PATIENCE_S, time.sleep, 0.2)
    refuse(1)
    assert pool.submit(UNNAMED, "length", PATIENCE_S, len, "abc").result(PATIENCE_S) == 3
    assert slow.result(PATIENCE_S) is None
    pool.close()


def test_a_send_queue_without_a_thread_is_an_error_that_names_it(refuse: Refuse) -> None:
    refuse(1)
    with pytest.raises(InternalError, match="responses: a thread could not start"):
        SendQueue()
    SendQueue().close()


def test_work_whose_thread_was_refused_never_runs(refuse: Refuse) -> None:
    ran: list[int] = []

    async def main() -> Any:
        refuse(1)
        with pytest.raises(InternalError, match="stream: a thread could not start"):
            await run_in_thread("stream", ran.append, 1)
        return await run_in_thread("stream", len, "abc")

    assert asyncio.run(main()) == 3
    assert ran == []


def test_an_error_of_the_work_itself_is_raised_as_it_is() -> None:
    def fails() -> None:
        raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        asyncio.run(run_in_thread("stream", fails))


@pytest.mark.parametrize("refused", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_mapped_work_is_done_once_and_in_order_with_the_threads_that_start(
    monkeypatch: pytest.MonkeyPatch, refused: int, skipped: int
) -> None:
    start, seen, done = threading.Thread.start, 0, list[int]()

    def refusing(thread: threading.Thread) -> None:
        nonlocal seen
        seen += 1
        if skipped < seen <= skipped + refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)

    def square(number: int) -> int:
        done.append(number)
        time.sleep(0.002)
        return number**2

    assert map_in_threads(square, range(7), 3) == [0, 1, 4, 9, 16, 25, 36]
    assert sorted(done) == list(range(7))


@pytest.mark.parametrize("refused", [0, 1])
def test_mapped_work_raises_its_first_error_when_all_that_began_has_ended(refuse: Refuse, refused: int) -> None:
    begun, ended = list[int](), list[int]()

    def fails(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)
        ended.append(number)
        if number in (1, 2):
            raise RuntimeError(f"of {number}")

    refuse(refused)
    with pytest.raises(RuntimeError, match="of 1"):
        map_in_threads(fails, range(50), 2)
    assert sorted(begun) == sorted(ended)
    assert len(ended) < 10


def test_mapped_work_runs_in_as_many_threads_as_asked() -> None:
    meeting = threading.Barrier(3, timeout=PATIENCE_S)
    assert sorted(map_in_threads(lambda _: meeting.wait(), range(3), 3)) == [0, 1, 2]
    assert threading.current_thread() not in map_in_threads(lambda _: threading.current_thread(), range(9), 2)
    assert map_in_threads(int, [], 2) == []
