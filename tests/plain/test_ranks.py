"""Processes of ranks exchange parts of tensors, and all of them end when one does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import InternalError, RankFailed
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.shared_ranks import (
    SharedRanks,
    launch_all_gather,
    launch_all_reduce,
    shared_bytes,
)
from tandemrt.plugins.reference.collectives import all_gather, all_reduce
from tandemrt.plugins.tensors.host_tensor import CPU, HostTensor
from tandemrt.runtime.workers import ranks
from tandemrt.runtime.workers.ranks import RankProcesses
from tests.ranked import PART, add_what_is_commanded, fail_to_open, open_one_after_another
from tests.waiting import PATIENCE_S, eventually, receive_interrupts


@pytest.fixture
def processes() -> Iterator[RankProcesses]:
    opened = RankProcesses(3, add_what_is_commanded, (), shared_bytes(3, PART), 8)
    try:
        opened.wait_until_opened()
        yield opened
    finally:
        opened.close()


def run(processes: RankProcesses, shared: SharedRanks, number: int) -> list[int]:
    processes.command(lambda memory: memory.__setitem__(0, number))
    return [int(part[0]) for part in shared.exchange(np.array([number]))]


def shared_of(processes: RankProcesses) -> SharedRanks:
    return SharedRanks(0, processes.parts, processes.arrived, processes.require)


def alive(processes: RankProcesses) -> list[bool]:
    return [process.is_alive() for process in processes._processes]


def test_every_rank_gets_the_parts_of_all_in_order(processes: RankProcesses) -> None:
    shared = shared_of(processes)
    assert [run(processes, shared, number) for number in (1, 2, 3, 1)] == [[n, n + 1, n + 2] for n in (1, 2, 3, 1)]
    processes.close()
    assert alive(processes) == [False, False]
    with pytest.raises(RankFailed, match="the ranks were closed"):
        processes.require()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(13, r"rank [12] failed: ValueError: thirteen"), (14, r"rank [12] ended with status 3"), (15, "rank 1 has not")],
)
def test_a_rank_that_fails_ends_all_ranks_and_is_named(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", PATIENCE_S if number != 15 else 0.3)
    shared = shared_of(processes)
    run(processes, shared, 1)
    with pytest.raises(RankFailed, match=reason):
        run(processes, shared, number)
    assert alive(processes) == [False, False]
    with pytest.raises(RankFailed, match=reason):
        run(processes, shared, 1)


def test_a_device_that_waits_for_a_rank_for_too_long_ends_all_ranks(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(processes, shared_of(processes), 1)
    monkeypatch.setattr(ranks, "ANSWER_S", 0.1)
    processes.idle = lambda: False
    assert eventually(processes._closing.is_set)
    with pytest.raises(RankFailed, match="ranks 1, 2 have not answered for"):
        processes.require()
    assert alive(processes) == [False, False]


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_stopped_rank_is_named_and_fails_once_a_request_must_end(processes: RankProcesses, stopped: int) -> None:
    shared = shared_of(processes)
    run(processes, shared, 1)
    assert processes.problem is None
    pid = processes._processes[stopped - 1].pid
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: processes.problem == f"rank {stopped} is stopped (SIGSTOP)")
    os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: processes.problem is None)
    assert run(processes, shared, 2) == [2, 3, 4]
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: processes.problem is not None)
    processes.overdue = lambda: True
    with pytest.raises(RankFailed, match=rf"rank {stopped} is stopped \(SIGSTOP\), and a request had to end"):
        run(processes, shared, 3)
    assert alive(processes) == [False, False]


def test_a_rank_that_does_not_answer_fails_sooner_once_a_request_must_end(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "OVERDUE_S", 0.3)
    shared = shared_of(processes)
    run(processes, shared, 1)
    processes.overdue = lambda: True
    with pytest.raises(RankFailed, match=r"rank 1 (has not answered for|is stopped)"):
        run(processes, shared, 15)


def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(processes: RankProcesses) -> None:
    os.kill(processes._processes[1].pid, signal.SIGKILL)
    assert eventually(processes._closing.is_set)
    for require in (processes.require, processes.wait_until_opened):
        with pytest.raises(RankFailed, match="rank 2 was ended by SIGKILL"):
            require()
    assert alive(processes) == [False, False]


def test_ranks_are_ready_once_the_last_one_has_opened() -> None:
    opened = RankProcesses(3, open_one_after_another, (), shared_bytes(3, PART), 8)
    try:
        opened.wait_until_opened()
        assert [event.is_set() for event in opened._opened[1:]] == [True, True]
    finally:
        opened.close()


def test_a_rank_that_cannot_open_ends_all_ranks() -> None:
    opened = RankProcesses(2, fail_to_open, (), shared_bytes(2, PART), 8)
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no weights for rank 1"):
        opened.wait_until_opened()
    assert alive(opened) == [False]


@pytest.mark.parametrize("refused", ["process", "thread"])
def test_ranks_without_a_process_or_thread_leave_no_process(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    started: list[Any] = []
    start = SpawnProcess.start

    def refuse_the_second(process: SpawnProcess) -> None:
        if refused == "process" and started:
            raise BlockingIOError("Resource temporarily unavailable")
        start(process)
        started.append(process)

    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    if refused == "process":
        monkeypatch.setattr(SpawnProcess, "start", refuse_the_second)
    else:
        monkeypatch.setattr(Thread, "start", refuse)
    expected, message = (RankFailed, "a process for a rank") if refused == "process" else (InternalError, "ranks: a")
    with pytest.raises(expected, match=f"{message}.* could not start"):
        RankProcesses(3, add_what_is_commanded, (), shared_bytes(3, PART), 8)
    assert [process.is_alive() for process in started] == [False] * (refused == "process")


def test_ranks_outlive_the_thread_that_opened_them() -> None:
    opened: list[RankProcesses] = []
    thread = Thread(target=lambda: opened.append(RankProcesses(2, add_what_is_commanded, (), shared_bytes(2, PART), 8)))
    thread.start()
    thread.join()
    try:
        opened[0].wait_until_opened()
        assert [run(opened[0], shared, number) for shared in [shared_of(opened[0])] for number in (1, 2)]
    finally:
        opened[0].close()


@pytest.mark.parametrize(("end", "stopped"), [(signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGINT, False)])
def test_the_ranks_end_with_the_process_that_started_them(tmp_path: Path, end: signal.Signals, stopped: bool) -> None:
    script = tmp_path / "unguarded.py"  # without an "if __name__" around the start
    script.write_text(
        "import time\n"
        "from tests.ranked import PART, RankProcesses, add_what_is_commanded, shared_bytes\n"
        "opened = RankProcesses(2, add_what_is_commanded, (), shared_bytes(2, PART), 8)\n"
        "opened.wait_until_opened()\n"
        "print(opened._processes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        preexec_fn=receive_interrupts,
    ) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        if stopped:
            os.kill(rank, signal.SIGSTOP)
        process.send_signal(end)
        process.wait(PATIENCE_S)
    assert eventually(lambda: not Path(f"/proc/{rank}").exists())


@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.sampled_from(["float32", "float16"])
)
def test_collectives_of_ranks_equal_the_reference_bit_by_bit(
    count: int, rows: int, part: int, repeated: int, dtype: str
) -> None:
    rng = np.random.default_rng([count, rows, part])
    width = max(part, count * part - repeated)
    parts = [rng.normal(size=(1, rows, part)).astype(dtype) for _ in range(count)]
    memory = bytearray(shared_bytes(count, parts[0].nbytes))
    arrived = [[Semaphore(0) for _ in range(count)] for _ in range(count)]
    results: dict[int, list[Any]] = {}

    def serve(rank: int) -> None:
        context = Context(CPU, ranks=SharedRanks(rank, memory, arrived))
        x, total = HostTensor(parts[rank]), HostTensor(np.empty_like(parts[0]))
        gathered = HostTensor(np.empty((1, rows, width), dtype))
        launch_all_reduce({"x": x, "sum": total}, {}, context).run()
        launch_all_gather({"x": x, "gathered": gathered}, {"width": width}, context).run()
        results[rank] = [total.numpy(), gathered.numpy()]

    threads = [Thread(target=serve, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = all_reduce(parts[0], parts[1:]), all_gather(parts[0], width, parts[1:])
    for rank in range(count):
        for result, expected in zip(results[rank], wanted, strict=True):
            np.testing.assert_array_equal(result.view(np.uint8), expected.view(np.uint8))


def test_all_gather_rejects_a_width_that_the_parts_cannot_fill() -> None:
    with pytest.raises(ValueError, match="width: from 4 to 8 is needed for 2 parts, got 9"):
        all_gather(np.zeros(4), 9, [np.zeros(4)])
