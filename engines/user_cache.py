"""The user's cache folder: what can be made again at any time, kept because making it takes long.

A cache that cannot be written, or is removed in the middle of it, costs time and nothing else.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """``TANDEMRT_CACHE`` if it is set, else ``tandemrt`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("TANDEMRT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandemrt"


def write_cache(file: Path, data: bytes) -> None:
    """Write ``file`` as :func:`write_file` does, or do nothing where that is impossible."""
    with suppress(OSError):
        write_file(file, data)


def write_file(file: Path, data: bytes) -> None:
    """Write ``file``, which is whole at any time, also for other processes. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_bytes(data)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def is_private(path: Path) -> bool:
    """Whether a file or folder is this user's and nobody else may write it, as code that is run must be."""
    stat = path.stat()
    return stat.st_uid == os.geteuid() and not stat.st_mode & 0o022


def make_private(folder: Path) -> None:
    """Make ``folder``, or take what others may do with it away, where that is possible."""
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


def trim_cache(folder: Path, nbytes: int) -> None:
    """Remove the files of ``folder`` that were not touched for longest, until the others are at most ``nbytes``."""
    with suppress(OSError):
        files = [(file, file.stat()) for file in folder.iterdir()]
        excess = sum(stat.st_size for _, stat in files) - nbytes
        for file, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
            if excess <= 0:
                break
            file.unlink(missing_ok=True)
            excess -= stat.st_size
