"""Answers that tests keep: recorded.txt has a digest of each, so that no bug changes one unnoticed.

After an intended change, `RECORD=FOLDER python -m pytest -n 0 FILE` writes the digests again, and each answer to a file
in FOLDER. Compare these files with those of the commit before: the difference is what the change does.
"""

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

FILE = Path(__file__).parent / "recorded.txt"
_FLOAT = re.compile(r"\d+\.\d{5,}(e[+-]?\d+)?")  # shown with as many digits as every processor computes
_DROPPED = object()
_OTHERS = (None, -1, 0, "", [], {}, True, 1.5, 10**12, math.nan)  # of any type


def require_recorded(name: str, answers: Iterable[str]) -> None:
    """Raise AssertionError unless ``answers`` are those that were recorded under ``name``."""
    lines = [_FLOAT.sub(lambda number: f"{float(number[0]):.5g}", answer) for answer in answers]
    text = "\n".join(lines)
    digest = f"{len(lines)} {crc32(text.encode(errors='backslashreplace')):08x}"
    recorded = dict(line.split(": ") for line in FILE.read_text().splitlines())
    if "RECORD" in os.environ:
        folder = Path(os.environ["RECORD"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("/", " ")).write_text(text, errors="backslashreplace")
        recorded[name] = digest
        FILE.write_text("".join(f"{each}: {recorded[each]}\n" for each in sorted(recorded)))
    assert recorded.get(name) == digest, f"answers have changed; if they should, see {Path(__file__).name}"


def in_order(text: str) -> str:
    """Return the text of a value with the members of its frozensets in order."""
    return re.sub(r"frozenset\(\{(.*?)\}\)", lambda members: f"{sorted(members[1].split(', '))}", text)


def changes(record: Any, every: int = 1) -> Iterator[str]:
    """Change one value of ``record`` after the other, in place, and yield what has changed; then restore it.

    A value is left out, and replaced by each ``every``-th of its neighbours and of values of any type. An object gets a
    field that no reader knows; a list loses its last member, is reversed, and gets a member twice.
    """
    turn = itertools.count(1)
    for place, outer, at in list(_places(record, "")):
        before = outer.copy()
        alternatives = (*_neighbours(before[at]), *_OTHERS)
        for other in (_DROPPED, *(each for each in alternatives if next(turn) % every == 0)):
            if other is _DROPPED:
                del outer[at]
            else:
                outer[at] = other
            yield f"{place} {'left out' if other is _DROPPED else f'{other!r:.80}'}"
            outer.clear()
            outer.extend(before) if isinstance(outer, list) else outer.update(before)


def _places(record: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The path, the container and the key of each value; of a list, of the last one."""
    if isinstance(record, dict):
        for key in record:
            yield f"{path}.{key}", record, key
            yield from _places(record[key], f"{path}.{key}")
    elif isinstance(record, list) and record:
        yield f"{path}[-1]", record, len(record) - 1
        yield from _places(record[-1], f"{path}[-1]")


def _neighbours(value: Any) -> tuple[Any, ...]:
    match value:
        case bool():
            return (not value,)
        case int():
            return (value + 1, value - 1, value * 2, str(value))
        case float():
            return (value + 0.25, -value, *([int(value)] if math.isfinite(value) else []))
        case str():
            return (f"{value}x", value.upper(), value[:-1])
        case list():
            return (value[:-1], value[::-1], [*value, *value[:1]])
        case Mapping():
            return ({**value, "unknown_field": 1},)
        case _:
            return ()
