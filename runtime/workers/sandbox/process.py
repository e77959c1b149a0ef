"""One worker process, and the connection to it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from weakref import WeakSet

from tandemrt.engines.validation.errors import BackendUnavailable, ProcessLost
from tandemrt.runtime.workers.sandbox.frames import read, write

START_S = 60.0  # timeout of the start, for slow machines
_PROGRAM = (
    "import sys; memory, parent, *sys.path = sys.argv[1:]; "
    "from tandemrt.runtime.workers.sandbox.child import serve; serve(int(memory), int(parent))"
)

# By default libraries start one thread per core, and each thread uses address space.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")

# Signals of a process to itself, from native code: the task is to blame.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

_alive: "WeakSet[Process]" = WeakSet()


class Process:
    """A Python process that runs tasks (child.py). For one thread; only ``kill`` may be called from any thread.

    ``memory_bytes``: limit of its address space. Raises BackendUnavailable if it cannot start.
    """

    def __init__(self, memory_bytes: int) -> None:
        command = [interpreter(), "-c", _PROGRAM, str(memory_bytes), str(os.getpid()), *sys.path]
        with ExitStack() as undo:
            try:
                self._pipe, child_end = socket.socketpair()
                undo.callback(self._pipe.close)
                with child_end:
                    # In its own session, because an interrupt at the terminal is meant for the parent only.
                    self._popen = subprocess.Popen(
                        command, stdin=child_end.fileno(), start_new_session=True, env=os.environ | _ONE_THREAD
                    )
            except OSError as error:
                raise BackendUnavailable(f"{command[0]}: a worker process could not be started: {error}") from error
            undo.pop_all()
        _alive.add(self)
        try:
            ready = read(self._pipe, time.monotonic() + START_S)
        except OSError:  # TimeoutError is one
            ready = None
        if ready is None:
            self.end()
            raise BackendUnavailable(
                f"{command[0]}: a worker process did not start ({self._exit_cause()}); see its standard error"
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def request(self, message: bytes, limit_s: float) -> bytearray:
        """Return the reply to ``message``.

        Raises TimeoutError after ``limit_s``, ChildProcessError if the task crashes the process, ProcessLost if it ends
        otherwise. In each case the process has ended.
        """
        end = time.monotonic() + limit_s
        try:
            write(self._pipe, message, end)
            reply = read(self._pipe, end)
        except TimeoutError:
            self.end()
            raise
        except OSError:  # the process has closed its end
            reply = None
        if reply is None:
            self.end()
            if -self._popen.returncode in _CRASHES:
                raise ChildProcessError(self._exit_cause())
            raise ProcessLost(f"the worker process of this request ended ({self._exit_cause()}); send it again")
        return reply

    def kill(self) -> None:
        """Kill the process and its children. A thread that waits for a reply gets ProcessLost."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)  # it leads its own session

    def end(self) -> None:
        """Kill the process and release its resources."""
        self.kill()
        self._popen.wait()
        self._pipe.close()

    def forget(self) -> None:
        """In a forked child: forget the process, because it belongs to the parent."""
        self._pipe.close()
        self._popen.returncode = 0  # Popen must not wait for it

    def _exit_cause(self) -> str:
        code = self._popen.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def interpreter() -> str:
    """The path of a Python of this version. ``sys.executable`` may be a program that embeds Python (Triton's stub)."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [Path(prefix) / "bin" / name for prefix in (sys.exec_prefix, sys.base_exec_prefix)]
    if Path(sys.executable or "").name.startswith("python"):
        candidates.insert(0, Path(sys.executable))
    program = next((str(path) for path in candidates if os.access(path, os.X_OK)), None) or shutil.which(name)
    if program is None:
        raise BackendUnavailable(f"no {name} was found to start a process with: looked for {candidates[0]} and in PATH")
    return program


def _forked() -> None:
    for process in list(_alive):
        process.forget()
    _alive.clear()


os.register_at_fork(after_in_child=_forked)
