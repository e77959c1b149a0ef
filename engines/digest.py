"""sha256 digests of files."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Files that hold weights: too large to read on every opening, so their digests are checked only when asked for.
WEIGHT_SUFFIXES = (".safetensors", ".engine")


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content as lowercase hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Return the digest of every file, taken side by side: a core hashes less than a disk reads."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(file_digest, paths))


def combined_digest(digests: dict[str, str]) -> str:
    """Return one sha256 for named digests: that of the lines ``digest  name``, sorted by name (as sha256sum prints)."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def holds_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)
