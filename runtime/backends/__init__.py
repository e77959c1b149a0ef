"""Backends: each is one file that opens engines (base.Engine)."""

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.manifest import RUNNABLE
from tandemrt.runtime.backends.base import Engine


def open_engines(bundle: Bundle, device: torch.device, threads: int | None) -> dict[str, Engine]:
    """Open every engine of ``bundle`` on ``device``. Raises BackendUnavailable for engines that cannot run here."""
    from tandemrt.runtime.backends.onnxruntime import OnnxRuntimeEngine

    engines: dict[str, Engine] = {}
    for name, entry in bundle.manifest.engines.items():
        if entry.backend not in RUNNABLE:
            raise BackendUnavailable(
                f"engine {name!r}: built for {entry.backend} ({entry.target}), which this version can build but not "
                f"run; it runs {', '.join(RUNNABLE)}: build the bundle with one of those in the recipe's [backend] name"
            )
        engines[name] = OnnxRuntimeEngine.open(bundle.path(name), bundle.contract(name), device=device, threads=threads)
    return engines
