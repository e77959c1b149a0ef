"""Keep running engines intact when weights of their bundle are truncated or overwritten in place.

onnxruntime maps the weights that it does not repack, such as the embedding table. Without care, an overwritten file
changes the texts, and a read past the end of a truncated file ends the process with SIGBUS. A read lease (fcntl(2))
lets the kernel hold a writer back until this process has copied what it maps. It costs neither memory nor time while
no file changes. Without a lease, the weights are copied when the bundle opens.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.validation.errors import BadBundle

log = logging.getLogger(__name__)

POLL_S = 0.25  # how long a writer waits at most before the copy begins; the kernel waits 45 s (lease-break-time)
_CHUNK = 4 << 20  # bytes that are copied at a time: the memory that a copy takes on top of itself
# Magic numbers (statfs(2)) of file systems on which every writer meets the lease: ext2 to ext4, xfs, btrfs, f2fs,
# tmpfs, overlay. Another machine may change a file on a network file system without breaking a lease.
_LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630}


class MappedWeights:
    """The weight files of ``bundle`` that engines map into this process.

    Create it before the engines open, call ``watch`` after they have, and ``close`` when no engine runs any more.
    Raises BadBundle if a file no longer has the size that the manifest lists. Does nothing outside of Linux.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._name = bundle.name
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._leased: list[int] = []  # file descriptors with a lease
        self._others: list[int] = []  # without
        if sys.platform != "linux":
            return
        try:
            for name, listed in bundle.manifest.files.items():
                if holds_weights(name):
                    self._open(bundle.folder / name, listed.size)
        except BaseException:
            self._release()
            raise

    def watch(self) -> None:
        """Copy the weights that no lease holds, and watch the leases from a thread of its own."""
        if self._others:
            self._copy(self._others)
        if not self._leased:
            return
        thread = threading.Thread(target=self._watch, name="tandemrt-weights", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # without a thread that watches, a lease would only delay the writer
            self._copy(self._leased)

    def close(self) -> None:
        """Release the leases, without waiting. Safe to call in any thread, twice, and without ``watch``."""
        self._closed.set()
        if self._thread is None:
            self._release()

    def _open(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        (self._leased if _lease(descriptor) else self._others).append(descriptor)
        if (actual_size := os.fstat(descriptor).st_size) != size:
            raise BadBundle(
                f"{path}: must have {size} bytes, it has {actual_size}; build the bundle again or copy it anew"
            )

    def _watch(self) -> None:
        try:
            while self._leased and not self._closed.wait(POLL_S):
                if broken := [each for each in self._leased if fcntl.fcntl(each, fcntl.F_GETLEASE) != fcntl.F_RDLCK]:
                    self._report(broken)
                    self._copy(broken)
        finally:
            self._release()

    def _report(self, descriptors: list[int]) -> None:
        for each in descriptors:
            log.warning(
                "bundle %s: another process is changing %s; this process goes on with a copy of the weights as they "
                "were. Replace a bundle by renaming a new folder to its name, as `tandemrt export build` does",
                self._name,
                _path(each),
            )

    def _copy(self, descriptors: list[int]) -> None:
        """Copy what this process maps of the files, and let writers continue."""
        for each in list(descriptors):
            try:
                copy_mappings(_path(each))
            except OSError:
                log.exception("bundle %s: weights of %s cannot be copied into memory", self._name, _path(each))
            finally:
                for owners in (self._leased, self._others):
                    if each in owners:
                        owners.remove(each)
                _release(each)

    def _release(self) -> None:
        while self._leased:
            _release(self._leased.pop())
        while self._others:
            _release(self._others.pop())


def copy_mappings(path: str) -> int:
    """Replace this process's private mappings of ``path`` by memory with the same bytes; return their number.

    Addresses stay valid, also for threads that read them meanwhile. Raises OSError without enough memory.
    """
    copied = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *name = line.split(maxsplit=5)
        if name == [path.replace("\n", r"\012")] and permissions.startswith("r") and permissions.endswith("p"):
            begin, end = (int(address, 16) for address in span.split("-"))
            for at in range(begin, end, _CHUNK):
                _copy_pages(at, min(_CHUNK, end - at))
            copied += end - begin
    return copied


def _copy_pages(at: int, size: int) -> None:
    memory = _checked(_libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS, -1, 0))
    ctypes.memmove(memory, at, size)
    _checked(_libc().mremap(memory, size, size, _MOVE_TO, at))  # atomic: no thread sees the address unmapped


def _lease(descriptor: int) -> bool:
    """Whether the kernel now holds writers of the file back until this process releases ``descriptor``."""
    header = ctypes.create_string_buffer(256)  # larger than struct statfs
    if _libc().fstatfs(descriptor, header) or ctypes.c_ulong.from_buffer(header).value not in _LOCAL:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; the default SIGIO ends the process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, 0)  # no signal at all: the thread asks for the state of its leases
    except OSError:  # another user's file, a file that is open for writing, a file system without leases
        return False
    return True


def _release(descriptor: int) -> None:
    with suppress(OSError):  # explicit, because a forked child holds the descriptor as well
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)


def _path(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())  # as /proc/self/maps names it, also after a rename


_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    return libc


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"memory: {errno.errorcode.get(number, number)}")
    return address
