"""What this machine can build and run, and what is missing for the rest."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.engines.manifest import FILE_NAME
from tandemrt.engines.tensorrt.library import LIBRARIES, install, load
from tandemrt.engines.tensorrt.recipe import ComputeCapability
from tandemrt.plugins.kernels import cudnn_attention


@dataclass(frozen=True)
class Finding:
    """One backend on this machine. ``builds`` and ``runs`` hold "yes" or what is missing."""

    backend: str
    version: str
    builds: str
    runs: str


def machine() -> dict[str, str]:
    """What a report of a problem should say about the machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        "gpu": ", ".join(gpus) or "none that torch can use",
        "torch": torch.__version__,
        "xgrammar": _version("xgrammar") or "missing",
        "transformers": _version("transformers") or "missing",
    }


def findings() -> list[Finding]:
    """One finding for each backend in the plan."""
    return [_onnxruntime_cpu(), _onnxruntime_cuda(), _tensorrt_rtx(), _tensorrt()]


def missing(what: str) -> list[str]:
    """Say, one line each, what must be installed before ``what`` runs here: a backend, an extra, or a bundle's folder.

    Raises BadRequest for anything else.
    """
    by_backend = {finding.backend: finding for finding in findings()}
    if what in by_backend:
        runs = by_backend[what].runs
        return [] if runs.startswith("yes") else [f"{what} {runs}"]
    if what in _EXTRAS:
        absent = [package for package in _EXTRAS[what] if _version(package) is None]
        return [f"{what} needs {', '.join(absent)}: pip install 'tandemrt[{what}]'"] if absent else []
    if not (Path(what) / FILE_NAME).exists():
        known = ", ".join([*by_backend, *_EXTRAS])
        raise BadRequest(f"WHAT: must be one of {known}, or the folder of a bundle, received {quoted(what)}")
    backends = {engine.backend for engine in Bundle.read(what).manifest.engines.values()}
    return [line for backend in sorted(backends) for line in missing(backend)]


def _onnxruntime_cpu() -> Finding:
    version = _version("onnxruntime") or _version("onnxruntime-gpu")
    works = "yes" if version else "needs: pip install 'tandemrt[cpu]'"
    return Finding("onnxruntime-cpu", version or "-", works, works)


def _onnxruntime_cuda() -> Finding:
    version = _version("onnxruntime-gpu")
    if not version:
        runs = "needs: pip uninstall onnxruntime, pip install 'tandemrt[cuda]'"
    elif not torch.cuda.is_available():
        runs = "needs a CUDA GPU and a torch built for CUDA"
    else:
        slower = cudnn_attention.unavailable()
        runs = "yes" if slower is None else f"yes; prompts by our own attention, up to twice as slow: {slower}"
    return Finding("onnxruntime-cuda", version or "-", _onnxruntime_cpu().builds, runs)


def _tensorrt_rtx() -> Finding:
    version, missing = _library("tensorrt-rtx")
    if missing:
        return Finding("tensorrt-rtx", version, missing, missing)
    return Finding("tensorrt-rtx", version, "yes, ahead of time", _gpu() or _rtx_gpu() or _UNTRIED)


def _tensorrt() -> Finding:
    version, missing = _library("tensorrt")
    if missing:
        return Finding("tensorrt", version, missing, missing)
    return Finding("tensorrt", version, _gpu() or _UNTRIED, _gpu() or _UNTRIED)


def _library(backend: str) -> tuple[str, str]:
    """The version of a TensorRT module, "-" without one, and what is missing or wrong, empty when nothing is."""
    try:
        return str(load(backend).__version__), ""
    except BackendUnavailable:
        version = next(filter(None, map(_version, _PACKAGES[backend])), "-")
        return version, f"needs version {LIBRARIES[backend].major}: {install(backend)}"


def _gpu() -> str:
    return "" if torch.cuda.is_available() else "needs a CUDA GPU and a torch built for CUDA"


def _rtx_gpu() -> str:
    found = torch.cuda.get_device_capability()
    known = get_args(ComputeCapability)
    return "" if f"{found[0]}.{found[1]}" in known else f"no: needs a GPU of compute capability {', '.join(known)}"


_EXTRAS = {"serve": ("fastapi", "prometheus-client", "uvicorn"), "triton": ("protobuf", "tritonclient")}
# What no machine of ours has executed (docs/tensorrt.md).
_UNTRIED = "yes, not verified: tandemrt export check BUNDLE"
_PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
