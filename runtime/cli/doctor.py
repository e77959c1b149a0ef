"""Find out which backends this machine can build for and run, and what is missing."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from packaging.requirements import Requirement

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.recipe.tensorrt import ComputeCapability
from tandemrt.engines.tensorrt.library import LIBRARIES, install, load, load_builder, opens
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.engines.validation.extras import pip_install


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine. ``builds`` and ``runs`` begin with "yes", or name what is missing."""

    backend: str
    version: str
    builds: str
    runs: str

    def notes(self) -> list[str]:
        """Return a line for what is missing or worth knowing, one if it is the same for building and running."""
        answers = {", to build": self.builds, ", to run": self.runs}
        if self.builds == self.runs:
            answers = {"": self.runs}
        notes = {use: text.removeprefix("needs: ") for use, text in answers.items() if text != "yes"}
        return [f"{self.backend}{use}: {text}" for use, text in notes.items()]


def machine() -> dict[str, str]:
    """Return facts about the machine for a problem report."""
    gpus = []
    if _version("torch"):
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        "gpu": ", ".join(gpus) or "none that torch can use",
        "torch": _version("torch") or "missing",
        "xgrammar": _version("xgrammar") or "missing",
        "transformers": _version("transformers") or "missing",
    }


def backend_statuses() -> list[BackendStatus]:
    """Return the status of every backend."""
    return [_onnxruntime_cpu(), _onnxruntime_cuda(), _tensorrt_rtx(), _tensorrt()]


def missing(what: str) -> list[str]:
    """Return a line for each requirement of ``what`` (a backend, an extra or a bundle folder) that is not installed.

    Raises BadRequest for anything else.
    """
    by_backend = {status.backend: status for status in backend_statuses()}
    if what in by_backend:
        runs = by_backend[what].runs
        return [] if runs.startswith("yes") else [f"{what} {runs}"]
    extras = importlib.metadata.metadata("tandemrt").get_all("Provides-Extra", [])
    if what in extras:
        absent = _missing_packages(what)
        return [f"{what} needs {', '.join(absent)}: {pip_install(what)}"] if absent else []
    if not (Path(what) / FILE_NAME).exists():
        known = ", ".join(dict.fromkeys([*by_backend, *extras]))
        raise BadRequest(f"WHAT: must be one of {known}, or the folder of a bundle, received {quoted(what)}")
    backends = {engine.backend for engine in Bundle.read(what).manifest.engines.values()}
    return [line for backend in sorted(backends) for line in missing(backend)]


def _missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra of pyproject.toml that are not installed, or not in a version that it allows."""
    absent: list[str] = []
    for requirement in map(Requirement, importlib.metadata.requires("tandemrt") or []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "tandemrt":  # an extra that brings others
            absent += [package for other in sorted(requirement.extras) for package in _missing_packages(other)]
        elif (
            version := _version(requirement.name) or _version(_REPLACED_BY.get(requirement.name, requirement.name))
        ) is None:
            absent.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            absent.append(f"{requirement.name}{requirement.specifier} instead of {version}")
    return list(dict.fromkeys(absent))


def _onnxruntime_cpu() -> BackendStatus:
    version = _version("onnxruntime") or _version("onnxruntime-gpu")
    works = "yes" if version else f"needs: {pip_install('cpu')}"
    builds = works if not version or _version("torch") else f"needs torch: {pip_install('build')}"
    return BackendStatus("onnxruntime-cpu", version or "-", builds, works)


def _onnxruntime_cuda() -> BackendStatus:
    version = _version("onnxruntime-gpu")
    if not version:
        runs = f"needs: pip uninstall onnxruntime, then {pip_install('cuda')}"
    elif not _has_gpu():
        runs = _NO_GPU
    else:
        from tandemrt.plugins.kernels import cudnn_attention

        slower = cudnn_attention.unavailable()
        runs = "yes" if slower is None else f"yes; prefill by our own kernel, up to twice as slow: {slower}"
    return BackendStatus("onnxruntime-cuda", version or "-", _onnxruntime_cpu().builds, runs)


def _tensorrt_rtx() -> BackendStatus:
    version, missing = _library("tensorrt-rtx")
    if missing:
        return BackendStatus("tensorrt-rtx", version, missing, missing)
    return BackendStatus("tensorrt-rtx", version, "yes, ahead of time", _gpu() or _rtx_gpu() or _UNTRIED)


def _tensorrt() -> BackendStatus:
    version, missing = _library("tensorrt")
    if missing:
        return BackendStatus("tensorrt", version, f"{missing}, or another interpreter's (backend.python)", missing)
    runs = _gpu() or f"yes; this release opens its own plans and {opens('tensorrt', version)}"
    try:
        load_builder("tensorrt")
    except BackendUnavailable as error:
        return BackendStatus("tensorrt", version, f"no, or with another interpreter (backend.python): {error}", runs)
    return BackendStatus("tensorrt", version, _gpu() or _UNTRIED, runs)


def _library(backend: str) -> tuple[str, str]:
    """Return the version of a TensorRT module ("-" without one) and what is missing ("" if nothing is)."""
    try:
        return str(load(backend).__version__), ""
    except BackendUnavailable:
        version = next(filter(None, map(_version, _PACKAGES[backend])), "-")
        versions = " or ".join(map(str, LIBRARIES[backend].runs))
        return version, f"needs version {versions}: {install(backend)}"


def _gpu() -> str:
    return "" if _has_gpu() else _NO_GPU


def _has_gpu() -> bool:
    if not _version("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def _rtx_gpu() -> str:
    import torch

    sm = torch.cuda.get_device_capability()
    known = get_args(ComputeCapability)
    return "" if f"{sm[0]}.{sm[1]}" in known else f"no: needs a GPU of compute capability {', '.join(known)}"


_REPLACED_BY = {"onnxruntime": "onnxruntime-gpu"}  # the same module
_NO_GPU = "needs a CUDA GPU and a torch built for CUDA"
# TensorRT-RTX and the builder of TensorRT 11 have never run on our machines (docs/tensorrt.md).
_UNTRIED = "yes, not verified: tandemrt check BUNDLE"
_PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
