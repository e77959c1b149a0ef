"""Backends: each is one file that opens engines (base.Engine)."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.gpus import OLDEST_WITH_KERNELS
from tandemrt.engines.manifest import RUNNABLE, EngineName
from tandemrt.engines.operators import HEADS
from tandemrt.engines.tensorrt.library import LIBRARIES
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Engine

if TYPE_CHECKING:
    from tandemrt.runtime.backends.shared_weights import SharedWeights

_OPENING = 4  # sessions that open at a time: reading and optimizing a graph takes one thread each


def open_engines(bundle: Bundle, device: torch.device, threads: int | None) -> dict[str, Engine]:
    """Open every engine of ``bundle`` on ``device``. Raises BackendUnavailable for engines that cannot run here."""
    for name, entry in bundle.manifest.engines.items():
        if entry.backend not in RUNNABLE:
            raise BackendUnavailable(
                f"engine {name!r}: built for {entry.backend} ({entry.built_for}), which this version can build but not "
                f"run; it runs {', '.join(RUNNABLE)}: build the bundle with one of those in the recipe's [backend] name"
            )
    if device.type == "cuda" and any(entry.backend in LIBRARIES for entry in bundle.manifest.engines.values()):
        from tandemrt.runtime.backends.tensorrt.plan import memory_needed, require_memory

        require_memory(memory_needed(bundle), torch.cuda.mem_get_info(device)[0])
    names = list(bundle.manifest.engines)
    in_steps = any(bundle.engine(name).decoder is not None for name in names)
    open_one = partial(_open, bundle, device, threads, _shared_weights(bundle, device) if in_steps else None)
    if device.type == "cuda":  # engines keep to the stream that is current in this thread
        return {name: open_one(name) for name in names}
    with ThreadPoolExecutor(_OPENING) as pool:
        return dict(zip(names, pool.map(open_one, names), strict=True))


def _shared_weights(bundle: Bundle, device: torch.device) -> "SharedWeights":
    from tandemrt.runtime.backends.shared_weights import SharedWeights

    return SharedWeights(bundle.folder, device)


def _open(
    bundle: Bundle, device: torch.device, threads: int | None, weights: "SharedWeights | None", name: EngineName
) -> Engine:
    # A backend is imported when a bundle asks for it: none of them must be installed for another one to run.
    if bundle.engine(name).backend in LIBRARIES:
        from tandemrt.runtime.backends.tensorrt.engine import TensorRtEngine

        return TensorRtEngine.open(bundle, name, device)
    if bundle.engine(name).decoder is not None:
        from tandemrt.runtime.backends.executor import Executor

        assert weights is not None
        return Executor.open(bundle, name, device, threads, weights)
    if name in HEADS and _runs_kernels(bundle, device):
        from tandemrt.runtime.backends.kernels import KernelEngine

        return KernelEngine.open(bundle, name, device)
    from tandemrt.runtime.backends.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine.open(
        bundle.path(name),
        bundle.contract(name),
        device=device,
        threads=threads,
        spinning=name not in HEADS,
    )


def _runs_kernels(bundle: Bundle, device: torch.device) -> bool:
    """Whether kernels take the place of the engines without weights. Older GPUs have none and run their graphs."""
    if device.type != "cuda" or not bundle.manifest.kernels:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_WITH_KERNELS
