"""The provenance of a bundle: versions, and the git commit if the source is a checkout."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tandemrt import __version__
from tandemrt.engines.bundle.manifest import EngineName, Provenance
from tandemrt.engines.recipe.backends import BACKENDS

# Packages that determine the bytes of a bundle, if they are installed.
PACKAGES = (
    "numpy",
    "nvidia-cuda-nvrtc",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "tokenizers",
    *(package for backend in BACKENDS.values() if backend.library for package in backend.library.packages),
)


def collect(*, recipe: str, checkpoints: dict[EngineName, str]) -> Provenance:
    """Describe this build. ``recipe`` and ``checkpoints`` are sha256 digests."""
    commit, dirty = source_state(Path(__file__).resolve())
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tandemrt=__version__,
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        packages=_versions(),
        recipe=recipe,
        checkpoints=checkpoints,
    )


def source_state(file: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that tracks ``file`` and whether it has changes, or (None, None)."""
    # A package installed inside another project's checkout is not tracked there; that commit does not describe it.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit, status = _git(file.parent, "rev-parse", "HEAD"), _git(file.parent, "status", "--porcelain")
    return commit, None if status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
