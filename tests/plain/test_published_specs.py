"""What each published config means beyond its sizes, as published_specs.txt says: a row of a family that changes shows.

After an intended change, `python -m tests.plain.test_published_specs` writes the file again; read its difference.
"""

import dataclasses
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from tandemrt.export.read.spec import ModelSpec
from tests.plain.test_families import PUBLISHED

FILE = Path(__file__).parent / "published_specs.txt"
_SIZES = {"layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_length"}


def summary(record: Any) -> str:
    """The fields of a spec, or of a record in it, that differ from their default; equal values in a row are counted."""
    fields = [field for field in dataclasses.fields(record) if field.name not in _SIZES]
    values = {field.name: getattr(record, field.name) for field in fields}
    texts = {field.name: _text(values[field.name]) for field in fields if values[field.name] != field.default}
    return " ".join(f"{name}={text}" for name, text in texts.items() if text)


def _text(value: Any) -> str:
    """The text of a value, or nothing for one that says nothing."""
    if dataclasses.is_dataclass(value):
        return f"[{summary(value)}]"
    if isinstance(value, tuple) and len(value) > 4 and all(isinstance(each, float) for each in value):
        return f"{len(value)}*({value[0]:.4g}..{value[-1]:.4g})"
    if isinstance(value, tuple):
        runs = [(text or "0", len(list(run))) for text, run in groupby(map(_text, value))]
        return "" if [text for text, _ in runs] == ["0"] else "+".join(f"{count}*{text}" for text, count in runs)
    if isinstance(value, bool) or value is None:
        return "1" if value else ""
    return f"{value:.6g}" if isinstance(value, float) else str(value or "")


def lines() -> list[str]:
    return [f"{name}: {summary(ModelSpec.from_hf(json.loads(config)))}" for name, (config, _) in PUBLISHED.items()]


def test_every_published_config_means_what_the_file_says() -> None:
    assert lines() == FILE.read_text().splitlines()


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
