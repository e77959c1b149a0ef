"""End a child process with its parent, however the parent ends."""

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_parent(parent: int) -> None:
    """On Linux, let the kernel kill this process when the thread of the process ``parent`` that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)
