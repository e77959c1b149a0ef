"""Find out which backends this machine can build for and run, and what is missing."""

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path

from packaging.requirements import Requirement

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.recipe import backend_status as installed
from tandemrt.engines.recipe.backend_status import BackendStatus
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.tensors.devices.lookup import gpus


def machine() -> dict[str, str]:
    """Return facts about the machine for a problem report."""
    names = [gpu.name for gpu in gpus()]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        "gpu": ", ".join(names) or "none that torch can use",
        "torch": installed.package_version("torch") or "missing",
        "xgrammar": installed.package_version("xgrammar") or "missing",
        "transformers": installed.package_version("transformers") or "missing",
    }


def backend_statuses() -> list[BackendStatus]:
    """Return the status of every backend."""
    folder = "tandemrt.runtime.device.backends"
    openers = {name: importlib.import_module(f"{folder}.{row.folder}.opener") for name, row in BACKENDS.items()}
    return [opener.backend_status(name) for name, opener in openers.items()]


def missing(what: str) -> list[str]:
    """Return a line for each requirement of ``what`` (a backend, an extra or a bundle folder) that is not installed.

    Raises BadRequest for anything else.
    """
    by_backend = {row.backend: row for row in backend_statuses()}
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
            version := installed.package_version(requirement.name)
            or installed.package_version(_REPLACED_BY.get(requirement.name, requirement.name))
        ) is None:
            absent.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            absent.append(f"{requirement.name}{requirement.specifier} instead of {version}")
    return list(dict.fromkeys(absent))


_REPLACED_BY = {"onnxruntime": "onnxruntime-gpu"}  # the same module
