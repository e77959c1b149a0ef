"""sha256 digests of files."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tandemrt.engines.parallel.threads import map_in_threads

# Files too large to read on every opening: their digests are checked on request.
WEIGHT_SUFFIXES = (".safetensors", ".engine")


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content as lowercase hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Return the digest of every file, computed in parallel: a disk reads faster than a core hashes."""
    return map_in_threads(file_digest, paths, os.cpu_count() or 1)


def combined_digest(digests: dict[str, str]) -> str:
    """Return the sha256 of the lines ``digest  name``, sorted by name, in the format of sha256sum."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def holds_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)
