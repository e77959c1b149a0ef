"""Find the GGUF files of a model: parts NAME-00001-of-00003.gguf and so on, and its vision part, mmproj-NAME.gguf."""

import re
from collections.abc import Collection
from pathlib import Path

from tandemrt.engines.validation.errors import BadCheckpoint, clipped

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """Return the files of the model that ``file`` is, or is a part of. Raises BadCheckpoint if one is absent."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    parts = [file.with_name(f"{match['name']}-{number:05}-of-{match['count']}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise BadCheckpoint(f"{file}: it is one of {count} parts, {clipped(', '.join(absent))} should be next to it")
    return parts


def vision_files(file: Path) -> list[str]:
    """Return the names of the vision parts in the folder of a model, if it holds no other model."""
    files = list(file.parent.glob("*.gguf"))
    return sorted(other.name for other in files if _is_vision(other)) if only_model(files) == parts_of(file)[0] else []


def only_model(files: Collection[Path]) -> Path | None:
    """Return the only file but vision parts, or the first part if all are parts of one model; else None."""
    files = [file for file in files if not _is_vision(file)]
    first = min(files, default=None)
    if first is None or len(files) == 1:
        return first
    same = _PART.fullmatch(first.name)
    names = {(match["name"], match["count"]) if (match := _PART.fullmatch(file.name)) else None for file in files}
    return first if same is not None and len(names) == 1 else None


def _is_vision(file: Path) -> bool:
    return "mmproj" in file.name.lower()
