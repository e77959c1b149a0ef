"""The opener of TensorRT and TensorRT-RTX, and their status."""

from collections.abc import Callable
from typing import get_args

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.recipe import backend_status as installed
from tandemrt.engines.recipe.backend_status import NO_GPU, BackendStatus
from tandemrt.engines.recipe.backends import library_of
from tandemrt.engines.recipe.tensorrt import ComputeCapability
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.tensorrt.modules import install, load, load_builder, opens
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.opening import Opening
from tandemrt.runtime.device.backends.tensorrt import plan

# TensorRT-RTX and the builder of TensorRT 11 have never run on our machines (docs/tensorrt.md).
_UNTRIED = "yes, not verified: tandemrt check BUNDLE"


def engine_opener(opening: Opening) -> Callable[[EngineName], Engine]:
    """Return the function that opens an engine by its name, see Opener. It raises as TensorRtEngine.open does."""
    from tandemrt.runtime.device.backends.tensorrt.engine import TensorRtEngine  # it imports torch

    return lambda name: TensorRtEngine.open(opening.bundle, name, opening.device)


def require_memory(bundle: Bundle, device: torch.device) -> None:
    """Raise BackendUnavailable if a GPU has too little memory for all engines of ``bundle``."""
    if not device_of(device).on_host:
        plan.require_memory(plan.memory_needed(bundle), device_of(device).free_memory())


def backend_status(name: str) -> BackendStatus:
    """Return the status of the backend ``name``."""
    return _tensorrt(name) if name == "tensorrt" else _tensorrt_rtx(name)


def _tensorrt_rtx(name: str) -> BackendStatus:
    version, missing = _module(name)
    if missing:
        return BackendStatus(name, version, missing, missing)
    return BackendStatus(name, version, "yes, ahead of time", _no_gpu() or _no_rtx_gpu() or _UNTRIED)


def _tensorrt(name: str) -> BackendStatus:
    version, missing = _module(name)
    if missing:
        return BackendStatus(name, version, f"{missing}, or another interpreter's (backend.python)", missing)
    runs = _no_gpu() or f"yes; this release opens its own plans and {opens(name, version)}"
    try:
        load_builder(name)
    except BackendUnavailable as error:
        return BackendStatus(name, version, f"no, or with another interpreter (backend.python): {error}", runs)
    return BackendStatus(name, version, _no_gpu() or _UNTRIED, runs)


def _module(backend: str) -> tuple[str, str]:
    """Return the version of the module that is installed ("-" without one) and what is missing ("" if nothing is)."""
    try:
        return str(load(backend).__version__), ""
    except BackendUnavailable:
        library = library_of(backend)
        assert library is not None
        version = next(filter(None, map(installed.package_version, library.packages)), "-")
        return version, f"needs version {' or '.join(map(str, library.runs))}: {install(backend)}"


def _no_gpu() -> str:
    return "" if gpus() else NO_GPU


def _no_rtx_gpu() -> str:
    major, minor = gpus()[0].capability
    known = get_args(ComputeCapability)
    return "" if f"{major}.{minor}" in known else f"no: needs a GPU of compute capability {', '.join(known)}"
