"""The report of a built engine, as JSON next to it: layers, native layers, memory and profiles.

The fused layers and the memory of each profile are available only if the engine opens, on a GPU that it was built for.
Otherwise the report contains the reason and only the parsed network.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.calls import Range
from tandemrt.engines.contract.gpus import covers, name_of
from tandemrt.export.compile.tensorrt import worker
from tandemrt.export.compile.tensorrt.network import native_layers
from tandemrt.plugins.tensorrt.modules import logger
from tandemrt.plugins.tensors.devices.lookup import gpus

SUFFIX = ".inspect.json"


def write(
    engine: Path,
    *,
    compiler: str,
    built_for: str,
    layers: Mapping[str, int],
    profiles: Mapping[str, Mapping[str, list[Range]]],
    opened: Mapping[str, Any],
) -> Path:
    """Write the report of ``engine`` and return its file.

    ``profiles``: the ranges of every input, by profile. ``opened``: what the open engine says (``worker.opened``).
    """
    report = {
        "compiler": compiler,
        "built_for": built_for,
        "engine_bytes": engine.stat().st_size,
        "network_layers": dict(layers),
        "native": native_layers(layers),
        "profiles": {
            name: {"inputs": ranges, "memory_bytes": size}
            for (name, ranges), size in zip(profiles.items(), opened["memory"], strict=True)
        },
        "engine_layers": opened["engine_layers"],
        "engine_not_opened": opened["engine_not_opened"],
    }
    file = file_of(engine)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return file


def file_of(engine: Path) -> Path:
    return engine.with_suffix(SUFFIX)


def opened_here(trt: Any, engine: Path, built_for: str, profiles: int) -> dict[str, Any]:
    """Return what ``engine`` says if it opens on this machine's GPU, else the reason why not (``worker.opened``)."""
    reason = None
    if not gpus():
        reason = "this machine has no GPU"
    elif not covers(built_for, capability := gpus()[0].capability):
        reason = f"built for {built_for}; the GPU here is {name_of(capability)}"
    if reason is not None:
        return {"memory": [None] * profiles, "engine_layers": None, "engine_not_opened": reason}
    log = logger(trt)
    log.clear()
    return worker.opened(trt, log, engine.read_bytes(), profiles)
