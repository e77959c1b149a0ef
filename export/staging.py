"""Write a bundle folder so that it appears complete or not at all."""

import errno
import fcntl
import glob
import json
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from tandemrt.engines.bundle.lock import builder_lock, locked
from tandemrt.engines.bundle.manifest import FILE_NAME, VERSION, Manifest
from tandemrt.engines.user_cache import cache_folder
from tandemrt.engines.validation.errors import BadBundle, clipped

_FICLONE = 0x40049409  # ioctl_ficlone(2): share the blocks of another file until one of the two is written


def check_destination(out: Path, name: str, *, force: bool) -> None:
    """Raise BadBundle unless ``out`` is free, an empty folder, or a bundle of the same name.

    A path inside another bundle is rejected: that bundle would hold files that its manifest does not list. ``force``
    also allows a bundle of another name, or one whose manifest cannot be read, and nothing else.
    """
    if around := next((folder for folder in out.resolve().parents if (folder / FILE_NAME).is_file()), None):
        raise BadBundle(f"out must not be inside a bundle; {around} is one. Choose another place with --out")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / FILE_NAME).is_file():
        raise BadBundle(
            f"out must be free or hold a bundle; {out} holds something else. Choose another place with --out"
        )
    if force:
        return
    try:
        existing = Manifest.read(out).name
    except BadBundle as error:
        older = _name_in_older_manifest(out)
        if older is None:
            raise BadBundle(
                f"out holds a bundle that cannot be read; replace it with --force, or choose --out: {error}"
            ) from error
        existing = older
    if existing != name:
        raise BadBundle(
            f"out must not hold another bundle; {out} is {existing!r}, not {name!r}. Use --force or another --out"
        )


@contextmanager
def sole_builder(place: Path, begin: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process is in such a block for ``place``, a folder of the cache, then run the block.

    ``begin`` receives a title if it must wait; the other process has probably built ``place`` then. Raises BadBundle
    for a cache that cannot be written.
    """
    file = builder_lock(place)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():  # another user's file can be locked, but not touched
            file.touch()
    except OSError as error:
        raise unwritable_cache(error) from error
    with ExitStack() as stack:
        if stack.enter_context(locked(file)) is False:
            begin(f"Wait for another process that builds {place.name}")
            stack.enter_context(locked(file, wait=True))
        yield


def unwritable_cache(error: OSError) -> BadBundle:
    """Return the error for a cache folder that cannot be written."""
    why = f"{clipped(error.filename or cache_folder())}: {error.strerror}"
    return BadBundle(f"the cache folder must be writable; {why}. Set TANDEMRT_CACHE to another")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a new folder next to ``out``; it replaces ``out`` at the end, or is removed if anything fails.

    SIGTERM and SIGHUP raise SystemExit meanwhile, unless the program has handlers of its own. Leftovers of killed
    builds there are removed. Raises BadBundle while another process builds at ``out``.
    """
    with _exiting_on_signals(), _staged(out.resolve()) as folder:
        yield folder


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    mark = uuid.uuid4().hex[:8]
    building, old = out.with_name(f".{out.name}.building-{mark}"), out.with_name(f".{out.name}.old-{mark}")
    new_parents = [folder for folder in out.parents if not folder.exists()]
    locks = ExitStack()
    try:
        if new_parents:
            out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out.parent, wait=True):  # no other builder may remove a folder that is not locked yet
            _clear(out)
            building.mkdir()
            locks.enter_context(locked(building))
    except OSError as error:
        _remove_empty(new_parents)
        rule = f"out must be in a folder that can be written; {clipped(out.parent)}: {error.strerror}"
        raise BadBundle(f"{rule}. Choose another place with --out") from error
    try:
        yield building
        if out.exists():
            out.rename(old)
        try:
            building.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        _remove_empty(new_parents)
        raise
    finally:
        locks.close()
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit on signals that would else end the process at once, so that it can remove its files.

    Only the main thread may set handlers; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as a shell reports the signal

    ending = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in ending:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in ending:
            signal.signal(each, signal.SIG_DFL)


def place(source: Path, folder: Path) -> Path:
    """Copy a file into ``folder``; the copy shares its blocks where the file system can.

    It is never a hard link, because writing to the checkpoint would then change the bundle. A symbolic link is
    followed, because a bundle points to nothing outside itself. Returns the new path.
    """
    source, destination = source.resolve(), folder / source.name  # the name that the graph points to
    with source.open("rb") as original, destination.open("xb") as placed:
        try:
            try:
                fcntl.ioctl(placed.fileno(), _FICLONE, original.fileno())
            except OSError:
                _copy_data(original.fileno(), placed.fileno())
        except OSError as error:
            error.filename = error.filename or str(destination)
            raise
    return destination


def _copy_data(source: int, destination: int) -> None:
    """Copy between file descriptors within the kernel; holes stay holes."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(destination, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            os.lseek(source, at, os.SEEK_SET)
            os.lseek(destination, at, os.SEEK_SET)
            count = os.sendfile(destination, source, None, min(end - at, 1 << 30))
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            at += count


def _name_in_older_manifest(folder: Path) -> str | None:
    """The name of a bundle that an earlier version of this package built, so that a build can replace it."""
    try:
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("manifest_version") not in range(1, VERSION):
        return None
    return data.get("name") if isinstance(data.get("name"), str) else None


def _clear(out: Path) -> None:
    """Remove or restore what killed builds at ``out`` left. Raises BadBundle if one still runs."""
    name = glob.escape(out.name)
    for leftover in out.parent.glob(f".{name}.building-*"):
        with locked(leftover) as free:
            if free is False:
                raise BadBundle(
                    f"out must have one builder at a time; another process builds {out}. Wait for it, or choose "
                    "another place with --out"
                )
            if free:
                shutil.rmtree(leftover, ignore_errors=True)
    for old in out.parent.glob(f".{name}.old-*"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:  # killed between the two renames
            old.rename(out)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
