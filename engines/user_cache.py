"""The user's cache folder: files that take long to make and can be made again at any time.

A cache that cannot be written, or that is removed during a write, costs time and nothing else.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

BUNDLES, CHECKPOINTS = "bundles", "gguf"  # folders of the cache, for models that were built and GGUF files


def cache_folder() -> Path:
    """Return ``TANDEMRT_CACHE`` if it is set, else ``tandemrt`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("TANDEMRT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandemrt"


def write_cache(file: Path, data: bytes) -> None:
    """Write ``file`` as ``write_file`` does, but ignore OSError."""
    with suppress(OSError):
        write_file(file, data)


def write_file(file: Path, data: bytes) -> None:
    """Write ``file`` atomically: other processes never see a partial file. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_bytes(data)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def is_private(path: Path) -> bool:
    """Return whether this user owns the path and no other user may write it, as code that runs requires."""
    stat = path.stat()
    return stat.st_uid == os.geteuid() and not stat.st_mode & 0o022


def make_private(folder: Path) -> None:
    """Make ``folder``, and remove other users' access to it. Ignores OSError."""
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


def trim_cache(folder: Path, nbytes: int) -> None:
    """Remove the least recently modified files of ``folder`` until the rest has at most ``nbytes`` bytes."""
    with suppress(OSError):
        files = [(file, file.stat()) for file in folder.iterdir()]
        excess = sum(stat.st_size for _, stat in files) - nbytes
        for file, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
            if excess <= 0:
                break
            file.unlink(missing_ok=True)
            excess -= stat.st_size
