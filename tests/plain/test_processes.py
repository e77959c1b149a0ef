"""The pool of processes: what hangs, grows or dies in one harms nobody but whoever asked for it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.errors import BadRequest, Closed, InternalError, ProcessLost, QueueFull
from tandemrt.runtime.processes import pool as pools
from tandemrt.runtime.processes import process as processes
from tandemrt.runtime.processes.pool import ProcessPool
from tests.waiting import PATIENCE_S, eventually

MODULES = "sorted(name for name in __import__('sys').modules)"


@pytest.fixture
def pool() -> Iterator[Callable[..., ProcessPool]]:
    """A maker of pools, which are closed when the test is over."""
    made: list[ProcessPool] = []

    def make(**options: Any) -> ProcessPool:
        made.append(ProcessPool(**{"processes": 1} | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(pool: ProcessPool, function: Callable[..., Any], *arguments: Any, limit_s: float = PATIENCE_S) -> "Future[Any]":
    return pool.submit("", "work", limit_s, function, *arguments)


def gone(pid: int) -> bool:
    """Whether nothing is left of a child of this process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_work_is_done_elsewhere_by_one_process_after_the_other_and_nothing_heavy_is_imported(pool) -> None:
    one = pool()
    before = set(threading.enumerate())
    pids = {ask(one, os.getpid).result(PATIENCE_S) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["tandemrt-process"]
    modules = ask(one, eval, MODULES).result(PATIENCE_S)
    assert not {"torch", "numpy", "onnxruntime", "transformers", "xgrammar", "pydantic"} & set(modules)


def test_a_pool_that_nobody_asks_starts_nothing(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "Process", None)  # whoever started one would fail
    threads = set(threading.enumerate())
    pool().close()
    assert set(threading.enumerate()) <= threads


def test_what_takes_too_long_is_killed_and_the_next_one_has_a_process_of_its_own(pool) -> None:
    one = pool()
    pid = ask(one, os.getpid).result(PATIENCE_S)
    with pytest.raises(BadRequest, match=r"work took longer than 0\.2 s; simplify it"):
        ask(one, time.sleep, PATIENCE_S, limit_s=0.2).result(PATIENCE_S)
    assert gone(pid)
    assert ask(one, os.getpid).result(PATIENCE_S) != pid


def test_what_a_process_has_forked_ends_with_it(pool, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = f"import os, time\nif pid := os.fork(): open({str(noted)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    with pytest.raises(BadRequest, match="took longer"):
        ask(pool(), exec, program, limit_s=0.5).result(PATIENCE_S)
    assert eventually(lambda: gone(int(noted.read_text())))


def test_a_pattern_that_holds_its_interpreter_holds_no_other(pool) -> None:
    pattern = "import re; re.match('^(a+)+$', 'a' * 60 + '!')"
    with pytest.raises(BadRequest, match="took longer"):
        ask(pool(), exec, pattern, limit_s=0.5).result(PATIENCE_S)


def test_waiting_for_a_process_is_not_working(pool) -> None:
    one = pool()
    slow = ask(one, time.sleep, 1.0)
    quick = ask(one, len, "abc", limit_s=0.9)
    assert (slow.result(PATIENCE_S), quick.result(PATIENCE_S)) == (None, 3)


def test_one_that_is_killed_is_told_and_the_next_one_does_not_notice(pool) -> None:
    one = pool()
    with pytest.raises(ProcessLost, match=r"ended \(signal SIGKILL\); send it again"):
        ask(one, exec, "import os; os.kill(os.getpid(), 9)").result(PATIENCE_S)
    pid = ask(one, os.getpid).result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)  # while it has nothing to do
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ask(one, os.getpid).result(PATIENCE_S) != pid


def test_what_needs_too_much_memory_is_refused(pool) -> None:
    one = pool(memory_bytes=256 << 20)
    with pytest.raises(BadRequest, match="work took more memory than a process may have; simplify it"):
        ask(one, eval, "len('a' * (1 << 30))").result(PATIENCE_S)
    assert ask(one, len, "abc").result(PATIENCE_S) == 3


def test_an_error_of_the_work_is_told_with_its_kind(pool) -> None:
    one = pool()
    with pytest.raises(InternalError, match="work: ZeroDivisionError: division by zero"):
        ask(one, eval, "1 / 0").result(PATIENCE_S)
    with pytest.raises(InternalError, match="work: SystemExit: 3"):
        ask(one, sys.exit, 3).result(PATIENCE_S)


def test_what_waits_is_bounded(pool) -> None:
    one = pool(waiting=2)
    busy = ask(one, time.sleep, PATIENCE_S)
    assert eventually(busy.running)
    waiting = [ask(one, len, "abc") for _ in range(2)]
    with pytest.raises(QueueFull, match="work: at most 2 may wait for a process and as many do"):
        ask(one, len, "abc")
    one.close()
    for each in [busy, *waiting]:
        with pytest.raises(Closed):
            each.result(PATIENCE_S)


def test_work_that_nobody_waits_for_is_not_begun(pool) -> None:
    one = pool()
    busy = ask(one, time.sleep, 0.3)
    assert eventually(busy.running)
    unwanted = ask(one, os.kill, os.getpid(), signal.SIGKILL)
    assert unwanted.cancel()
    assert ask(one, len, "abc").result(PATIENCE_S) == 3


def test_closing_kills_what_runs_and_refuses_what_comes(pool) -> None:
    one = pool()
    pid = ask(one, os.getpid).result(PATIENCE_S)
    busy = ask(one, time.sleep, PATIENCE_S)
    assert eventually(busy.running)
    one.close()
    one.close()
    with pytest.raises(Closed):
        busy.result(PATIENCE_S)
    with pytest.raises(Closed):
        ask(one, len, "abc")
    assert eventually(lambda: gone(pid))


def test_an_idle_process_gives_its_memory_back(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_IDLE_S", 0.05)
    one = pool()
    threads = set(threading.enumerate())
    pid = ask(one, os.getpid).result(PATIENCE_S)
    assert eventually(lambda: gone(pid) and set(threading.enumerate()) <= threads)
    assert ask(one, os.getpid).result(PATIENCE_S) != pid


def test_as_many_processes_work_as_there_may_be(pool) -> None:
    two = pool(processes=2)
    sleeping = [ask(two, time.sleep, PATIENCE_S) for _ in range(3)]
    assert eventually(lambda: [each.running() for each in sleeping] == [True, True, False])


def test_a_program_that_embeds_python_still_finds_one(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/somewhere/triton_python_backend_stub")
    assert ask(pool(), len, "abc").result(PATIENCE_S) == 3


def test_a_process_that_cannot_start_is_said_to_whoever_needs_it(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROGRAM", "raise SystemExit(7)")
    with pytest.raises(Exception, match=r"a process did not start \(exit status 7\)"):
        ask(pool(), len, "abc").result(PATIENCE_S)


LEAVE = """
import os, sys, time
from tandemrt.runtime.processes.pool import ProcessPool
pool = ProcessPool()
print(pool.submit("", "work", 600.0, os.getpid).result(), flush=True)
busy = pool.submit("", "work", 600.0, time.sleep, 600.0)
while not busy.running():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "end",
    ["", "raise SystemExit(3)", "os._exit(0)", "os.kill(os.getpid(), 9)"],
    ids=["ends", "raises", "exits", "killed"],
)
def test_nothing_is_left_of_a_program_that_ends_while_work_is_done(end: str) -> None:
    """One that is killed cannot kill: its processes see it, or their time is over."""
    program = LEAVE.replace("600.0, time", "0.2, time") + end
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert eventually(lambda: gone(int(done.stdout)))


FORK = """
import os, sys
from tandemrt.runtime.processes.pool import ProcessPool
pool = ProcessPool()
pid = pool.submit("", "work", 600.0, os.getpid).result()
child = os.fork()
if child == 0:
    sys.stdin.read()  # a child that outlives its parent
    os._exit(0)
assert pool.submit("", "work", 600.0, os.getpid).result() == pid
print(pid, flush=True)
os._exit(0)
"""


def test_a_forked_child_holds_no_process_of_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert eventually(lambda: gone(pid))  # the child is still there and waits
        program.stdin.close()
