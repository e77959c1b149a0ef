"""What NVRTC made before, in ``kernels`` of the user's cache folder: the same input is compiled once."""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from tandemrt.engines.user_cache import cache_folder, trim_cache, write_cache

LIMIT = 256 << 20  # bytes; every kernel for every architecture takes about 10 MiB


def key_of(parts: Sequence[bytes]) -> str:
    """Name ``parts``, everything that decides what the compiler makes."""
    return hashlib.sha256(_joined(parts)).hexdigest()


def load(key: str) -> list[bytes] | None:
    """Return what was kept under ``key``, or None: there is nothing, or it is damaged."""
    file = _file(key)
    try:
        data = zlib.decompress(file.read_bytes())  # which holds a checksum
        os.utime(file)
    except (OSError, zlib.error):
        return None
    return _parted(data)


def keep(key: str, parts: Sequence[bytes]) -> None:
    """Keep ``parts`` under ``key``, at the cost of what was not used for longest."""
    write_cache(_file(key), zlib.compress(_joined(parts), 1))
    trim_cache(_file(key).parent, LIMIT)


def _file(key: str) -> Path:
    return cache_folder() / "kernels" / key


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)


def _parted(data: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(data):
        (length,) = struct.unpack_from("<q", data, start)
        parts.append(data[start + 8 : start + 8 + length])
        start += 8 + length
    return parts
