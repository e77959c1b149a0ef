"""The main loop of a worker process: runs tasks one by one, with a time limit per task and a memory limit.

This module imports little, so that the process starts quickly. Tasks import what they need.
"""

import json
import pickle
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, named
from tandemrt.runtime.workers.sandbox.frames import WithBytes, read, write
from tandemrt.runtime.workers.sandbox.parent import end_with_parent

GRACE_S = 5.0  # after the time limit; then the process ends itself, if its parent has not killed it


def serve(memory_bytes: int, parent: int) -> None:
    """Run the tasks that arrive over standard input, a socket, until it is closed or the process ``parent`` ends."""
    end_with_parent(parent)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    pipe = socket.socket(fileno=0)
    write(pipe, b"ready")
    while (message := read(pipe)) is not None:
        limit_s, work = pickle.loads(message)
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
        reply = _run_task(work)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(pipe, reply)


def _run_task(work: bytes) -> bytes:
    """Run a task and return its result: a line of JSON, then the bytes of WithBytes.

    Not as a pickle: the process has read untrusted input.
    """
    try:
        function, arguments = _loaded(work)
        result = function(*arguments)
        described, content = result if isinstance(result, WithBytes) else (result, b"")
        return b"%s\n%s" % (json.dumps({"result": described}).encode(), content)
    except MemoryError:
        return b'{"memory": true}\n'
    except BadRequest as error:
        return json.dumps({"rejected": str(error)}).encode() + b"\n"
    except BaseException as error:
        return json.dumps({"failed": named(error)}).encode() + b"\n"


def _loaded(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, arguments = pickle.loads(work)
    return function, arguments
