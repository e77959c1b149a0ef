"""What TensorRT and TensorRT-RTX can do on this machine."""

from typing import get_args

from tandemrt.engines.recipe import backend_status as installed
from tandemrt.engines.recipe.backend_status import NO_GPU, BackendStatus
from tandemrt.engines.recipe.backends import library_of
from tandemrt.engines.recipe.tensorrt import ComputeCapability
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.tensorrt.modules import install, load, load_builder, opens
from tandemrt.plugins.tensors.devices.lookup import gpus

# TensorRT-RTX and the builder of TensorRT 11 have never run on our machines (docs/tensorrt.md).
_UNTRIED = "yes, not verified: tandemrt check BUNDLE"


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
