"""The pool of worker processes: a call that hangs, grows or dies affects only its own caller."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.validation.errors import (
    BackendUnavailable,
    BadRequest,
    Closed,
    InternalError,
    ProcessLost,
    QueueFull,
)
from tandemrt.runtime.workers.clients import UNNAMED
from tandemrt.runtime.workers.sandbox import process as processes
from tandemrt.runtime.workers.sandbox.frames import WithBytes
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
from tests.waiting import PATIENCE_S, eventually

MODULES = "sorted(name for name in __import__('sys').modules)"


@pytest.fixture
def pool() -> Iterator[Callable[..., ProcessPool]]:
    """Return a factory of pools. They are closed at the end of the test."""
    pools: list[ProcessPool] = []

    def make(**options: Any) -> ProcessPool:
        pools.append(ProcessPool(**{"processes": 1} | options))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def submit(
    pool: ProcessPool, function: Callable[..., Any], *arguments: Any, limit_s: float = PATIENCE_S
) -> "Future[Any]":
    return pool.submit(UNNAMED, "work", limit_s, function, *arguments)


def has_ended(pid: int) -> bool:
    """Return whether the process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("content", [b"a\n\x00{}\n" * 3, b"\n"])
def test_bytes_of_a_result_come_as_they_are(pool, content: bytes) -> None:
    described, received = submit(pool(), WithBytes, ["a\nb", 1], content).result(PATIENCE_S)
    assert (described, bytes(received)) == (["a\nb", 1], content)


def test_calls_run_in_another_process_without_heavy_imports(pool) -> None:
    one = pool()
    before = set(threading.enumerate())
    pids = {submit(one, os.getpid).result(PATIENCE_S) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["tandemrt-process"]
    modules = submit(one, eval, MODULES).result(PATIENCE_S)
    assert not {"torch", "numpy", "onnxruntime", "transformers", "xgrammar", "pydantic"} & set(modules)


def test_an_unused_pool_starts_no_process(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrt.runtime.workers.sandbox.process.Process", None)  # starting a process would fail
    threads = set(threading.enumerate())
    pool().close()
    assert set(threading.enumerate()) <= threads


def test_a_call_past_its_time_limit_is_killed_and_the_next_call_gets_a_new_process(pool) -> None:
    one = pool()
    pid = submit(one, os.getpid).result(PATIENCE_S)
    with pytest.raises(BadRequest, match=r"work took longer than 0\.2 s; simplify it"):
        submit(one, time.sleep, PATIENCE_S, limit_s=0.2).result(PATIENCE_S)
    assert has_ended(pid)
    assert submit(one, os.getpid).result(PATIENCE_S) != pid


def test_children_of_a_worker_process_end_with_it(pool, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = f"import os, time\nif pid := os.fork(): open({str(noted)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    with pytest.raises(BadRequest, match="took longer"):
        submit(pool(), exec, program, limit_s=0.5).result(PATIENCE_S)
    assert eventually(lambda: has_ended(int(noted.read_text())))


def test_a_pattern_that_blocks_its_interpreter_blocks_no_other_process(pool) -> None:
    pattern = "import re; re.match('^(a+)+$', 'a' * 60 + '!')"
    with pytest.raises(BadRequest, match="took longer"):
        submit(pool(), exec, pattern, limit_s=0.5).result(PATIENCE_S)


def test_time_in_the_queue_does_not_count_against_the_time_limit(pool) -> None:
    one = pool()
    slow = submit(one, time.sleep, 1.0)
    quick = submit(one, len, "abc", limit_s=0.9)
    assert (slow.result(PATIENCE_S), quick.result(PATIENCE_S)) == (None, 3)


@pytest.mark.parametrize(("limit_s", "deadline_s"), [(0.3, 60.0), (60.0, 0.3)])
def test_a_call_has_the_smaller_of_its_two_times(pool, limit_s: float, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    future = pool().submit(UNNAMED, "work", limit_s, time.sleep, 40.0, deadline=deadline)
    with pytest.raises(BadRequest, match="work took longer than 0"):
        future.result(30.0)


def test_a_call_that_waits_too_long_fails_and_later_ones_run(pool) -> None:
    one = pool()
    slow = submit(one, time.sleep, 0.3)
    late = one.submit(UNNAMED, "work", PATIENCE_S, len, "abc", wait_s=0.1)
    in_time = one.submit(UNNAMED, "work", PATIENCE_S, len, "abc", wait_s=PATIENCE_S)
    assert (slow.result(PATIENCE_S), in_time.result(PATIENCE_S)) == (None, 3)
    with pytest.raises(QueueFull, match="work had to wait too long for other requests; try later"):
        late.result(PATIENCE_S)


def test_a_call_past_its_deadline_is_not_begun_and_ends_no_process(pool) -> None:
    one = pool()
    pid = submit(one, os.getpid).result(PATIENCE_S)
    late = one.submit(UNNAMED, "work", PATIENCE_S, len, "abc", deadline=time.monotonic())
    with pytest.raises(BadRequest, match="work did not begin before the request's time ran out"):
        late.result(PATIENCE_S)
    assert submit(one, os.getpid).result(PATIENCE_S) == pid


def test_the_error_of_a_call_keeps_nothing_of_it(pool) -> None:
    """The frames of a traceback would keep its arguments as long as a caller keeps the error."""
    late = pool().submit(UNNAMED, "work", PATIENCE_S, len, "abc", deadline=time.monotonic())
    error = late.exception(PATIENCE_S)
    assert isinstance(error, BadRequest)
    assert error.__traceback__ is None


def test_a_killed_worker_fails_its_call_and_the_next_call_succeeds(pool) -> None:
    one = pool()
    with pytest.raises(ProcessLost, match=r"ended \(signal SIGKILL\); send it again"):
        submit(one, exec, "import os; os.kill(os.getpid(), 9)").result(PATIENCE_S)
    pid = submit(one, os.getpid).result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)  # while the process is idle
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert submit(one, os.getpid).result(PATIENCE_S) != pid


def test_a_call_that_crashes_its_process_is_rejected_and_the_next_call_succeeds(pool) -> None:
    """As native code does that cannot allocate memory."""
    one = pool()
    with pytest.raises(BadRequest, match=r"work crashed its worker process \(signal SIGABRT\), for example by"):
        submit(one, exec, "import os; os.abort()").result(PATIENCE_S)
    assert submit(one, len, "abc").result(PATIENCE_S) == 3


def test_each_process_is_opened_before_its_first_call(pool) -> None:
    one = pool(opening=(exec, ("import sys; sys.opened = getattr(sys, 'opened', 0) + 1",)))
    program = "__import__('sys').opened"
    assert [submit(one, eval, program).result(PATIENCE_S) for _ in range(2)] == [1, 1]
    with pytest.raises(ProcessLost):
        submit(one, exec, "import os; os.kill(os.getpid(), 9)").result(PATIENCE_S)
    assert submit(one, eval, program).result(PATIENCE_S) == 1


def test_a_process_that_cannot_be_opened_is_an_error_of_each_call(pool) -> None:
    one = pool(opening=(exec, ("raise KeyError('seven')",)))
    for _ in range(2):
        with pytest.raises(InternalError, match="opening a worker process: KeyError: 'seven'"):
            submit(one, len, "abc").result(PATIENCE_S)


def test_a_busy_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    busy = f"import os\nopen({str(noted)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    script = (
        "from tandemrt.runtime.workers.clients import UNNAMED\n"
        "from tandemrt.runtime.workers.sandbox.pool import ProcessPool\n"
        f"ProcessPool().submit(UNNAMED, 'work', 3600.0, exec, {busy!r}).result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert eventually(lambda: noted.exists() and noted.read_text())
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: has_ended(int(noted.read_text())))


def test_a_process_has_1_gib_by_default(pool: Callable[..., ProcessPool]) -> None:
    assert submit(pool(), resource.getrlimit, resource.RLIMIT_AS).result(PATIENCE_S)[0] == 1 << 30


def test_a_call_that_needs_too_much_memory_is_rejected(pool) -> None:
    one = pool(memory_bytes=256 << 20)
    with pytest.raises(BadRequest, match="work took more memory than a worker process may use; simplify it"):
        submit(one, eval, "len('a' * (1 << 30))").result(PATIENCE_S)
    assert submit(one, len, "abc").result(PATIENCE_S) == 3


def test_an_exception_of_a_call_keeps_its_type(pool) -> None:
    one = pool()
    with pytest.raises(InternalError, match="work: ZeroDivisionError: division by zero"):
        submit(one, eval, "1 / 0").result(PATIENCE_S)
    with pytest.raises(InternalError, match="work: SystemExit: 3"):
        submit(one, sys.exit, 3).result(PATIENCE_S)


def test_the_queue_is_bounded(pool) -> None:
    one = pool(waiting=2)
    busy = submit(one, time.sleep, PATIENCE_S)
    assert eventually(busy.running)
    waiting = [submit(one, len, "abc") for _ in range(2)]
    with pytest.raises(QueueFull, match=r"work: the queue for worker processes is full \(2 tasks\)"):
        submit(one, len, "abc")
    one.close()
    for each in [busy, *waiting]:
        with pytest.raises(Closed):
            each.result(PATIENCE_S)


def test_an_abandoned_call_is_not_begun(pool) -> None:
    one = pool()
    busy = submit(one, time.sleep, 0.3)
    assert eventually(busy.running)
    unwanted = submit(one, os.kill, os.getpid(), signal.SIGKILL)
    assert unwanted.cancel()
    assert submit(one, len, "abc").result(PATIENCE_S) == 3


def test_closing_kills_running_calls_and_rejects_new_ones(pool) -> None:
    one = pool()
    pid = submit(one, os.getpid).result(PATIENCE_S)
    busy = submit(one, time.sleep, PATIENCE_S)
    assert eventually(busy.running)
    one.close()
    one.close()
    with pytest.raises(Closed):
        busy.result(PATIENCE_S)
    with pytest.raises(Closed):
        submit(one, len, "abc")
    assert eventually(lambda: has_ended(pid))


def test_an_idle_process_is_ended_to_free_its_memory(pool) -> None:
    one = pool(idle_s=0.05)
    threads = set(threading.enumerate())
    pid = submit(one, os.getpid).result(PATIENCE_S)
    assert eventually(lambda: has_ended(pid) and set(threading.enumerate()) <= threads)
    assert submit(one, os.getpid).result(PATIENCE_S) != pid


def test_the_pool_uses_up_to_its_maximum_of_processes(pool) -> None:
    two = pool(processes=2)
    sleeping = [submit(two, time.sleep, PATIENCE_S) for _ in range(3)]
    assert eventually(lambda: [each.running() for each in sleeping] == [True, True, False])


def test_an_embedding_program_still_finds_a_python_interpreter(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/somewhere/triton_python_backend_stub")
    assert submit(pool(), len, "abc").result(PATIENCE_S) == 3


def test_a_process_that_cannot_start_fails_the_request(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROGRAM", "raise SystemExit(7)")
    with pytest.raises(Exception, match=r"a worker process did not start \(exit status 7\)"):
        submit(pool(), len, "abc").result(PATIENCE_S)


@pytest.mark.parametrize("refused", ["socketpair", "Popen"])
def test_a_process_without_resources_fails_one_request_and_leaves_nothing_open(
    pool, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    one, make, ends = pool(), socket.socketpair, list[socket.socket]()

    def connect() -> tuple[socket.socket, ...]:
        ends.extend(pair := make())
        return pair

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", refuse if refused == "socketpair" else connect)
        if refused == "Popen":
            patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(BackendUnavailable, match=r"a worker process could not be started: .*Too many open files"):
            submit(one, len, "abc").result(PATIENCE_S)
    assert [end.fileno() for end in ends] == ([] if refused == "socketpair" else [-1, -1])
    assert submit(one, len, "abcd").result(PATIENCE_S) == 4


def test_a_thread_goes_on_after_a_callback_that_raises_a_base_exception(pool, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> None:
        raise SystemExit

    one = pool()
    for task in ([time.sleep, 0.2], [int, "x"]):  # one that returns, one that raises
        submit(one, *task).add_done_callback(fails)
    assert submit(one, len, "abc").result(PATIENCE_S) == 3
    assert caplog.text.count("a callback of finished work failed") == 2


LEAVE = """
import os, sys, time
from tandemrt.runtime.workers.clients import UNNAMED
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
pool = ProcessPool()
print(pool.submit(UNNAMED, "work", 600.0, os.getpid).result(), flush=True)
busy = pool.submit(UNNAMED, "work", 600.0, time.sleep, 600.0)
while not busy.running():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "end",
    ["", "raise SystemExit(3)", "os._exit(0)", "os.kill(os.getpid(), 9)"],
    ids=["ends", "raises", "exits", "killed"],
)
def test_no_process_is_left_after_a_program_ends_during_a_call(end: str) -> None:
    """A killed program cannot kill its workers. They notice its end, or reach their time limit."""
    program = LEAVE.replace("600.0, time", "0.2, time") + end
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert eventually(lambda: has_ended(int(done.stdout)))


FORK = """
import os, sys
from tandemrt.runtime.workers.clients import UNNAMED
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
pool = ProcessPool()
pid = pool.submit(UNNAMED, "work", 600.0, os.getpid).result()
child = os.fork()
if child == 0:
    sys.stdin.read()  # a child that outlives its parent
    os._exit(0)
assert pool.submit(UNNAMED, "work", 600.0, os.getpid).result() == pid
print(pid, flush=True)
os._exit(0)
"""


def test_a_forked_child_keeps_no_worker_of_its_parent_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert eventually(lambda: has_ended(pid))  # the child is still alive and waits
        program.stdin.close()
