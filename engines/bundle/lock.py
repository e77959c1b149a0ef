"""Locks of files and folders against other processes: what is being built or in use is not removed or built again."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[bool | None]:
    """Lock ``path`` while the block runs: True if it is locked now, False if another lock prevents that.

    None: the path cannot be opened, or its file system has no locks. ``shared``: several holders may lock it at once,
    and none without ``shared``. The kernel releases a lock when its process ends.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        holds: bool | None = True
    except BlockingIOError:
        holds = False
    except OSError:
        holds = None
    try:
        yield holds
    finally:
        if holds:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit, because a forked child has the descriptor as well
        os.close(descriptor)


def builder_lock(place: Path) -> Path:
    """Return the file that a process locks while it builds ``place``. The file stays, so that no lock is lost."""
    return place.with_name(f".{place.name}.lock")
