"""Read collections of schemas with instances from a folder. This project contains none of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema, and instances with the labels of their authors."""

    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


def collections(folder: Path) -> dict[str, list[Case]]:
    """Yield the cases of every collection in ``folder``, by the collection's name.

    Known are MaskBench (files with ``schema`` and ``tests``), JSON-Schema-Test-Suite (``tests/draft*``) and SchemaStore
    (``src/schemas/json`` with ``src/test`` and ``src/negative_test``). MaskBench disables some keywords by an
    underscore; they are restored in a second collection.
    """
    cases: dict[str, list[Case]] = {}
    for place in sorted(folder.rglob("maskbench/data")):
        cases["MaskBench"] = list(_maskbench(place))
        cases["MaskBench, restored"] = [replace(case, schema=_restored(case.schema)) for case in cases["MaskBench"]]
    for place in sorted(folder.rglob("tests/draft*")):
        if place.name in ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4"):
            cases[f"suite {place.name}"] = list(_suite(place))
    for place in sorted(folder.rglob("src/schemas/json")):
        cases["SchemaStore"] = list(_schemastore(place))
    return cases


def _maskbench(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("*.json")):
        value = _load(file)
        if isinstance(value, dict) and "schema" in value:
            tests = tuple((test["data"], bool(test["valid"])) for test in value.get("tests", ()))
            yield Case(file.stem, value["schema"], tests)


def _restored(schema: Any) -> Any:
    """Return a schema of MaskBench with the keywords ``_format`` and ``_uniqueItems`` under their real names."""
    if isinstance(schema, list):
        return [_restored(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kinds = {"_format": str, "_uniqueItems": bool}
    return {
        name.removeprefix("_") if name in kinds and isinstance(value, kinds[name]) else name: _restored(value)
        for name, value in schema.items()
    }


def _suite(folder: Path) -> Iterator[Case]:
    dialect = {"draft7": "http://json-schema.org/draft-07/schema#", "draft6": "http://json-schema.org/draft-06/schema#"}
    dialect["draft4"] = "http://json-schema.org/draft-04/schema#"
    for file in sorted(folder.glob("*.json")):
        for index, group in enumerate(_load(file)):
            schema = group["schema"]
            if isinstance(schema, dict) and folder.name in dialect:
                schema = {"$schema": dialect[folder.name], **schema}
            tests = tuple((test["data"], bool(test["valid"])) for test in group["tests"])
            yield Case(f"{file.stem} {index} {group['description']}", schema, tests)


def _schemastore(folder: Path) -> Iterator[Case]:
    root = folder.parents[2]
    for file in sorted(folder.glob("*.json")):
        schema = _load(file)
        if schema is None:
            continue
        tests = [(value, True) for value in _instances(root / "src/test" / file.stem)]
        wrong = [(value, False) for value in _instances(root / "src/negative_test" / file.stem)]
        yield Case(file.stem, schema, tuple(tests + wrong))


def _instances(folder: Path) -> Iterator[Any]:
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        value = _load(file)
        if value is not None:
            yield value


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None
