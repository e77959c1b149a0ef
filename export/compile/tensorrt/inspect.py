"""The report of a built engine, as JSON next to it: layers, native layers, memory and profiles.

The fused layers and the memory of each profile are available only if the engine opens, on a GPU that it was built for.
Otherwise the report contains the reason and only the parsed network.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines.contract.gpus import covers, name_of
from tandemrt.engines.tensorrt.library import logger
from tandemrt.export.compile.tensorrt.network import native_layers
from tandemrt.export.compile.tensorrt.profiles import Profile, resolve

SUFFIX = ".inspect.json"


def write(
    engine: Path,
    trt: Any,
    *,
    compiler: str,
    built_for: str,
    layers: Mapping[str, int],
    shapes: Mapping[str, tuple[int | str, ...]],
    profiles: Mapping[str, Profile],
) -> Path:
    """Write the report of ``engine`` and return its file."""
    opened, reason = _open(engine, trt, built_for)
    memory = [opened.get_device_memory_size_for_profile_v2(i) if opened else None for i in range(len(profiles))]
    report = {
        "compiler": compiler,
        "built_for": built_for,
        "engine_bytes": engine.stat().st_size,
        "network_layers": dict(layers),
        "native": native_layers(layers),
        "profiles": {
            name: {"inputs": resolve(shapes, profile), "memory_bytes": size}
            for (name, profile), size in zip(profiles.items(), memory, strict=True)
        },
        "engine_layers": _fused(trt, opened) if opened else None,
        "engine_not_opened": reason,
    }
    file = file_of(engine)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return file


def file_of(engine: Path) -> Path:
    return engine.with_suffix(SUFFIX)


def _open(engine: Path, trt: Any, built_for: str) -> tuple[Any, str | None]:
    if not torch.cuda.is_available():
        return None, "this machine has no GPU"
    capability = torch.cuda.get_device_capability()
    if not covers(built_for, capability):
        return None, f"built for {built_for}; the GPU here is {name_of(capability)}"
    log = logger(trt)
    log.clear()
    runtime = trt.Runtime(log)
    runtime.engine_host_code_allowed = True  # this process built it
    opened = runtime.deserialize_cuda_engine(engine.read_bytes())
    return opened, None if opened else log.summary()


def _fused(trt: Any, engine: Any) -> Any:
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return json.loads(text).get("Layers", [])
