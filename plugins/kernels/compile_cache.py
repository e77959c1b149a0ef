"""Disk cache of NVRTC output, in ``kernels`` of the user's cache folder."""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from tandemrt.engines.user_cache import cache_folder, is_private, make_private, trim_cache, write_cache

_DIGEST = hashlib.sha256().digest_size  # of key and content, stored before the content

LIMIT = 256 << 20  # bytes; every kernel for every architecture takes about 10 MiB


def key_of(parts: Sequence[bytes]) -> str:
    """Return the cache key of ``parts``: all inputs that determine the compiler's output."""
    return hashlib.sha256(_joined(parts)).hexdigest()


def load(key: str) -> list[bytes] | None:
    """Return the entry of ``key``, or None if it is missing, damaged, or writable by other users."""
    file = _file(key)
    try:
        if not (is_private(file.parent) and is_private(file)):
            return None
        stored = file.read_bytes()
        digest, data = stored[:_DIGEST], stored[_DIGEST:]
        if hashlib.sha256(key.encode() + data).digest() != digest:
            return None
        parts = _parted(zlib.decompress(data))
        os.utime(file)
    except (OSError, zlib.error, struct.error, MemoryError):
        return None
    return parts


def store(key: str, parts: Sequence[bytes]) -> None:
    """Store ``parts`` under ``key`` and evict the least recently used entries."""
    data = zlib.compress(_joined(parts), 1)
    make_private(_file(key).parent)
    write_cache(_file(key), hashlib.sha256(key.encode() + data).digest() + data)
    trim_cache(_file(key).parent, LIMIT)


def _file(key: str) -> Path:
    return cache_folder() / "kernels" / key


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _parted(data: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        parts.append(data[start + 8 : start + 8 + length])
        start += 8 + length
    return parts
