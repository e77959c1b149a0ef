"""Inside a process of the pool: one piece of work after another, each within its time and all within their memory.

Imports little, since whoever is the first to need a process waits for it to start; work imports what it needs.
"""

import json
import pickle
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

from tandemrt.engines.errors import BadRequest, named
from tandemrt.runtime.processes.frames import read, write

GRACE_S = 5.0  # beyond its time, until a process ends by itself that nobody is there to kill


def serve(memory_bytes: int) -> None:
    """Do what comes over standard input, a socket, until it is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    pipe = socket.socket(fileno=0)
    write(pipe, b"ready")
    while (message := read(pipe)) is not None:
        limit_s, work = pickle.loads(message)
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
        reply = _do(work)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(pipe, reply)


def _do(work: bytes) -> bytes:
    """Work, and its result as JSON: what has handled strange input is not believed as far as a pickle."""
    try:
        function, arguments = _loaded(work)
        return json.dumps({"result": function(*arguments)}).encode()
    except MemoryError:
        return json.dumps({"memory": True}).encode()
    except BadRequest as error:
        return json.dumps({"refused": str(error)}).encode()
    except BaseException as error:
        return json.dumps({"failed": named(error)}).encode()


def _loaded(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, arguments = pickle.loads(work)
    return function, arguments
