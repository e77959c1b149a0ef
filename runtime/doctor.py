"""What this machine can build and run, and what is missing for the rest."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch


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
        runs = "yes"
    return Finding("onnxruntime-cuda", version or "-", _onnxruntime_cpu().builds, runs)


def _tensorrt_rtx() -> Finding:
    version = _version("tensorrt-rtx-cu13-bindings") or _version("tensorrt-rtx-cu12-bindings")
    builds = "yes, ahead of time" if version else "needs: pip install 'tandemrt[tensorrt-rtx]'"
    return Finding("tensorrt-rtx", version or "-", builds, "no: this version of TandemRT builds these engines only")


def _tensorrt() -> Finding:
    version = _version("tensorrt")
    return Finding("tensorrt", version or "-", "no: not in this version of TandemRT", "no: not in this version")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
