"""Tables for ``export inspect`` about a bundle's TensorRT engines, from the report next to each engine."""

import json
from collections.abc import Iterator
from typing import Any

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import file_digest
from tandemrt.engines.recipe.backends import library_of
from tandemrt.export.compile.tensorrt.inspect import file_of


def summaries(bundle: Bundle) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a title and a table for each engine that was inspected when it was built.

    Skips a report that changed since the build; ``Bundle.problems`` lists it.
    """
    for name, engine in bundle.manifest.engines.items():
        if library_of(engine.backend) is None:
            continue
        file = file_of(bundle.path(name))
        expected = bundle.manifest.files.get(file.relative_to(bundle.folder).as_posix())
        if expected and file.is_file() and file_digest(file) == expected.sha256:
            yield f"{name}: TensorRT engine", _rows(json.loads(file.read_text(encoding="utf-8")))


def _rows(report: dict[str, Any]) -> dict[str, str]:
    native = ", ".join(f"{count} {kind}" for kind, count in report["native"].items() if count)
    fused = report["engine_layers"]
    rows = {
        "compiler": report["compiler"],
        "built for": report["built_for"],
        "native layers": native or "none",
        "network": f"{sum(report['network_layers'].values())} layers as parsed",
        "engine": f"{len(fused)} layers" if fused is not None else f"not opened: {report['engine_not_opened']}",
    }
    for use, profile in report["profiles"].items():
        memory = profile["memory_bytes"]
        shown = "" if memory is None else f"; {memory / 1e6:.1f} MB besides weights and caches"
        rows[f"profile {use}"] = f"{_ranges(profile['inputs'])}{shown}"
    return rows


def _ranges(inputs: dict[str, list[list[int]]]) -> str:
    # The sizes of caches repeat those of the other inputs.
    shown = {name: ranges for name, ranges in inputs.items() if not name.startswith("past_")}
    return ", ".join(f"{name} [{', '.join(_range(r) for r in ranges)}]" for name, ranges in shown.items())


def _range(sizes: list[int]) -> str:
    least, best, most = sizes
    if least == most:
        return str(least)
    return f"{least}-{most}" if best == most else f"{least}-{most} (best {best})"
