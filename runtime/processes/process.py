"""One process of the pool, as the thread sees it that hands it work."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from tandemrt.engines.errors import BackendUnavailable, ProcessLost
from tandemrt.runtime.processes.frames import read, write

START_S = 60.0  # for a process to start, on any machine
_PROGRAM = (
    "import sys; memory, *sys.path = sys.argv[1:]; "
    "from tandemrt.runtime.processes.child import serve; serve(int(memory))"
)

# Libraries would start as many threads as there are cores, and each takes address space.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")

_alive: "WeakSet[Process]" = WeakSet()


class Process:
    """A Python process that works for this one. Used by one thread; ``kill`` may be called from any.

    ``memory_bytes`` is the address space that it may use in all. Raises BackendUnavailable if it cannot start.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._pipe, theirs = socket.socketpair()
        command = [_interpreter(), "-c", _PROGRAM, str(memory_bytes), *sys.path]
        with theirs:
            try:
                # In a session of its own: who interrupts a program at its terminal does not mean its processes.
                self._popen = subprocess.Popen(
                    command, stdin=theirs.fileno(), start_new_session=True, env=os.environ | _ONE_THREAD
                )
            except OSError as error:
                self._pipe.close()
                raise BackendUnavailable(f"{command[0]}: a process could not be started: {error}") from error
        _alive.add(self)
        try:
            ready = read(self._pipe, time.monotonic() + START_S)
        except OSError:  # TimeoutError is one
            ready = None
        if ready is None:
            self.end()
            raise BackendUnavailable(f"{command[0]}: a process did not start ({self._how()}); see its standard error")

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, message: bytes, limit_s: float) -> bytes:
        """Return the reply to ``message``.

        Raises TimeoutError after ``limit_s`` and ProcessLost if the process ends; it is no longer there then.
        """
        end = time.monotonic() + limit_s
        try:
            write(self._pipe, message, end)
            reply = read(self._pipe, end)
        except TimeoutError:
            self.end()
            raise
        except OSError:  # nobody reads any more
            reply = None
        if reply is None:
            self.end()
            raise ProcessLost(f"the process that worked for this request ended ({self._how()}); send it again")
        return reply

    def kill(self) -> None:
        """End it now, whatever it does, and what it has forked. Who waits for it hears that."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)  # it leads a session of its own

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self.kill()
        self._popen.wait()
        self._pipe.close()

    def forget(self) -> None:
        """In a forked child: this is the parent's, which must be able to close it alone."""
        self._pipe.close()
        self._popen.returncode = 0  # nothing to wait for

    def _how(self) -> str:
        code = self._popen.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _interpreter() -> str:
    """A Python of this version. A program that embeds Python (Triton's stub) is none itself."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    beside = [Path(prefix) / "bin" / name for prefix in (sys.exec_prefix, sys.base_exec_prefix)]
    if Path(sys.executable or "").name.startswith("python"):
        beside.insert(0, Path(sys.executable))
    found = next((str(path) for path in beside if os.access(path, os.X_OK)), None) or shutil.which(name)
    if found is None:
        raise BackendUnavailable(f"no {name} was found to start a process with: looked for {beside[0]} and in PATH")
    return found


def _forked() -> None:
    for process in list(_alive):
        process.forget()
    _alive.clear()


os.register_at_fork(after_in_child=_forked)
