"""Programs, and the processes that they start, end with the process that runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandemrt.engines.parallel.programs import run_program

# A shell lets what it runs in the background ignore interrupts.
RUN = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from tandemrt.engines.parallel.programs import run_program
threading.Thread(target=run_program, args=[sys.argv[1:]]).start()
"""


def with_child(path: Path) -> list[str]:
    """Make a pipe at ``path``, and return a program whose child writes a line to it, and another one much later."""
    os.mkfifo(path)
    return ["/bin/sh", "-c", f"(echo begun; sleep 5; echo late) > {path} & wait"]


def test_a_program_returns_its_output_and_status() -> None:
    ended = run_program(["/bin/sh", "-c", "echo out $NAME; echo wrong >&2; cat; exit 7"], environment={"NAME": "x"})
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out x\n", "wrong\n", 7)


def test_a_timeout_ends_the_children_of_a_program(tmp_path: Path) -> None:
    command = with_child(tmp_path / "pipe")
    with os.fdopen(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        with pytest.raises(subprocess.TimeoutExpired):
            run_program(command, timeout_s=0.5)
        os.set_blocking(pipe.fileno(), True)
        assert pipe.read() == "begun\n"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_of_a_program_end_with_the_process_that_runs_it(tmp_path: Path, end: signal.Signals) -> None:
    """An interrupt comes to a process group, as from a terminal."""
    command = [sys.executable, "-c", RUN, *with_child(tmp_path / "pipe")]
    with subprocess.Popen(command, start_new_session=True) as process, (tmp_path / "pipe").open() as pipe:
        assert pipe.readline() == "begun\n"
        os.killpg(process.pid, end)
        assert pipe.read() == ""
