"""Two lanes of worker processes: clients with slow tasks delay quick tasks for a short time only."""

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, Closed, InternalError, QueueFull
from tandemrt.runtime.grammars.library import GrammarLibrary
from tandemrt.runtime.grammars.sources import load_modules
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.sandbox import lanes as lanes_module
from tandemrt.runtime.workers.sandbox.lanes import QUICK_S, ProcessLanes
from tandemrt.runtime.workers.sandbox.pool import ProcessPool, TooSlow, wait_for
from tests.plain.constraints import STOP, VOCABULARY
from tests.waiting import PATIENCE_S, eventually

LONG = StructuredOutputs(json={"enum": [f"{number:0100}" for number in range(200)]})  # read in a worker process


@pytest.fixture
def lanes() -> Iterator[ProcessLanes]:
    with closing(ProcessLanes(processes=2, idle_s=3 * PATIENCE_S)) as lanes:
        yield lanes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task leaves the quick lane, however busy the machine is."""
    monkeypatch.setattr(lanes_module, "QUICK_S", PATIENCE_S)


def submit(
    lanes: ProcessLanes, client: Client, function: Callable[..., Any], *arguments: Any, **options: Any
) -> "Future[Any]":
    return lanes.submit(client, "work", options.pop("limit_s", PATIENCE_S), function, *arguments, **options)


def running(pool: ProcessPool) -> int:
    """Return how many tasks run in ``pool``; 0 while one waits for a thread that starts."""
    return 0 if len(pool._shares) > pool._idle else len(pool._threads) - pool._idle


def occupied(lanes: ProcessLanes, function: Callable[..., Any], *arguments: Any) -> "list[Future[Any]]":
    """Occupy both processes of the slow lane with tasks of two clients."""
    tasks = [submit(lanes, Client(name), function, *arguments, limit_s=3 * PATIENCE_S) for name in "ab"]
    assert eventually(lambda: running(lanes._slow) == 2)
    return tasks


def test_quick_tasks_do_not_wait_for_the_slow_ones_of_other_clients(lanes: ProcessLanes) -> None:
    slow = [submit(lanes, Client(name), time.sleep, 3 * PATIENCE_S, limit_s=3 * PATIENCE_S) for name in "ab"]
    assert submit(lanes, Client("c"), len, "abc").result(PATIENCE_S) == 3
    assert submit(lanes, Client("d"), len, "abcd").result(PATIENCE_S) == 4
    assert not any(task.done() for task in slow)


def test_a_schema_is_read_while_two_other_clients_have_slow_tasks() -> None:
    lanes = ProcessLanes(opening=(load_modules, ()))
    with closing(GrammarLibrary(VOCABULARY, [STOP], processes=lanes, timeout_s=PATIENCE_S)) as library:
        slow = occupied(lanes, time.sleep, 3 * PATIENCE_S)
        source, _ = library.read(LONG, Client("c"), time.monotonic() + PATIENCE_S)
        assert source.text.startswith('{"enum": ["0000')
        assert not any(task.done() for task in slow)


@pytest.mark.usefixtures("patient")
def test_a_schema_waits_for_a_process_no_longer_than_its_time_limit() -> None:
    lanes = ProcessLanes(opening=(load_modules, ()))
    with closing(GrammarLibrary(VOCABULARY, [STOP], processes=lanes, timeout_s=0.3)) as library:
        slow = [submit(lanes, Client(name), time.sleep, 3.0) for name in "ab"]
        assert eventually(lambda: running(lanes._quick) == 2)
        with pytest.raises(QueueFull, match="reading it had to wait too long for other requests; try later"):
            library.read(LONG, Client("c"))
        assert any(task.result(PATIENCE_S) is None for task in slow)


def test_a_slow_task_runs_again_in_the_slow_lane(lanes: ProcessLanes) -> None:
    program = f"__import__('time').sleep({2 * QUICK_S}) or __import__('os').getpid()"
    pid = submit(lanes, UNNAMED, eval, program).result(PATIENCE_S)
    [process] = lanes._slow._threads.values()
    assert process is not None
    assert pid == process._popen.pid


@pytest.mark.parametrize(("limit_s", "named"), [(QUICK_S / 2, "0.25"), (2 * QUICK_S, "1")])
def test_a_task_past_its_limit_fails_in_either_lane(lanes: ProcessLanes, limit_s: float, named: str) -> None:
    with pytest.raises(TooSlow, match=f"work took longer than {named} s; simplify it"):
        submit(lanes, UNNAMED, time.sleep, PATIENCE_S, limit_s=limit_s).result(PATIENCE_S)


@pytest.mark.parametrize("seconds", [QUICK_S / 2, 3 * QUICK_S])
def test_a_deadline_ends_a_task_in_either_lane(lanes: ProcessLanes, seconds: float) -> None:
    begun = time.monotonic()
    deadline = begun + seconds
    with pytest.raises(BadRequest, match=r"work (took longer than|did not (begin|end) before the request's time ran)"):
        wait_for(submit(lanes, UNNAMED, time.sleep, PATIENCE_S, deadline=deadline), "work", deadline)
    assert seconds <= time.monotonic() - begun < PATIENCE_S / 2


def test_the_wait_for_the_slow_lane_counts_from_the_beginning(lanes: ProcessLanes, tmp_path: Path) -> None:
    end = tmp_path / "end"
    until_end = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    slow = occupied(lanes, exec, until_end)
    late = submit(lanes, Client("c"), exec, until_end, wait_s=2 * QUICK_S)
    assert eventually(lambda: len(lanes._slow._shares) == 1)  # half of the time is over
    time.sleep(1.2 * QUICK_S)
    end.touch()
    assert [task.result(PATIENCE_S) for task in slow] == [None, None]
    with pytest.raises(QueueFull, match="work had to wait too long for other requests; try later"):
        late.result(PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_an_error_of_a_task_is_not_tried_again(lanes: ProcessLanes) -> None:
    with pytest.raises(InternalError, match="work: ZeroDivisionError: division by zero"):
        submit(lanes, UNNAMED, eval, "1 / 0").result(PATIENCE_S)
    assert not lanes._slow._threads


def test_an_abandoned_task_does_not_run_again(lanes: ProcessLanes) -> None:
    task = submit(lanes, UNNAMED, time.sleep, PATIENCE_S)
    assert eventually(lambda: running(lanes._quick) == 1)
    assert task.cancel()
    assert eventually(lambda: running(lanes._quick) == 0)
    assert not lanes._slow._threads


@pytest.mark.usefixtures("patient")
def test_an_abandoned_task_leaves_the_queue_of_the_quick_lane(lanes: ProcessLanes) -> None:
    for name in "ab":
        submit(lanes, Client(name), time.sleep, PATIENCE_S)
    assert eventually(lambda: running(lanes._quick) == 2)
    waits = submit(lanes, Client("c"), os.kill, os.getpid(), signal.SIGKILL)
    assert waits.cancel()
    assert len(lanes._quick._shares) == 0


def test_an_abandoned_task_leaves_the_queue_of_the_slow_lane(lanes: ProcessLanes) -> None:
    occupied(lanes, time.sleep, PATIENCE_S)
    waits = submit(lanes, Client("c"), time.sleep, PATIENCE_S)
    assert eventually(lambda: len(lanes._slow._shares) == 1)
    assert waits.cancel()
    assert len(lanes._slow._shares) == 0


def test_a_full_slow_lane_is_an_error_of_the_task_that_moves_there() -> None:
    with closing(ProcessLanes(processes=1, waiting=1)) as lanes:
        runs = submit(lanes, UNNAMED, time.sleep, PATIENCE_S)
        assert eventually(lambda: running(lanes._slow) == 1)
        waits = submit(lanes, UNNAMED, time.sleep, PATIENCE_S)
        assert eventually(lambda: len(lanes._slow._shares) == 1)
        with pytest.raises(QueueFull, match=r"work: the queue for worker processes is full \(1 tasks\)"):
            submit(lanes, UNNAMED, time.sleep, PATIENCE_S).result(PATIENCE_S)
        assert not runs.done()
        assert not waits.done()


def test_closing_fails_the_tasks_of_both_lanes(lanes: ProcessLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = submit(lanes, UNNAMED, time.sleep, PATIENCE_S)
    assert eventually(lambda: running(lanes._slow) == 1)
    monkeypatch.setattr(lanes_module, "QUICK_S", PATIENCE_S)
    quick = submit(lanes, UNNAMED, time.sleep, PATIENCE_S)
    assert eventually(lambda: running(lanes._quick) == 1)
    lanes.close()
    for task in (slow, quick):
        with pytest.raises(Closed):
            task.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("work", "failure"),
    [
        (partial(len, "abc"), None),
        (partial(eval, "1 / 0"), InternalError),
        (partial(time.sleep, 1.5 * QUICK_S), None),
        (partial(time.sleep, PATIENCE_S), TooSlow),
        (partial(time.sleep, PATIENCE_S), CancelledError),
    ],
    ids=["quick", "error", "slow", "too slow", "cancelled"],
)
def test_an_ended_task_keeps_no_argument_alive(
    lanes: ProcessLanes, work: Callable[[], Any], failure: type[BaseException] | None
) -> None:
    """Not even while the caller keeps the future, and the thread that ran it is idle."""
    argument = partial(work)
    watched = weakref.ref(argument)
    gc.disable()
    try:
        task = submit(lanes, UNNAMED, argument, limit_s=2 * QUICK_S if failure is TooSlow else PATIENCE_S)
        del argument
        assert watched() is not None
        if failure is CancelledError:
            assert task.cancel()
        elif failure is None:
            task.result(PATIENCE_S)
        else:
            assert type(task.exception(PATIENCE_S)) is failure
        assert eventually(lambda: watched() is None)
    finally:
        gc.enable()
