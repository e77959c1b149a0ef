"""Hold a model repository against what this version of TandemRT serves, before any server does."""

import re
import sys
from importlib import metadata
from pathlib import Path

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.deployment import Deployment
from tandemrt.engines.errors import BadBundle, BadRepository, BadRequest
from tandemrt.engines.manifest import RUNNABLE
from tandemrt.export.triton import config
from tandemrt.export.triton.repository import MODEL_FILE, VERSION

STUB = "python/triton_python_backend_stub"


def problems(folder: Path, *, bundle: Bundle | None = None, backends: Path | None = None) -> list[str]:
    """Say, one line each, what would keep the model in ``folder`` from being served as written. Empty: nothing.

    ``bundle`` is the one it should serve, if that is known. ``backends`` is the server's backend directory: with it,
    the Python of its stub is compared with the one running here.
    """
    try:
        found = config.read_config(folder / config.FILE_NAME)
    except BadRepository as error:
        return [str(error)]
    lines = config.differences(found, config.model_config(folder.name, parameters={}))
    model = folder / VERSION / "model.py"
    try:
        written = model.read_bytes() == MODEL_FILE.encode()
    except OSError as error:
        lines.append(f"{model} must be a readable file; {error.strerror}. Write the repository again")
    else:
        if not written:
            lines.append(f"{model} must be the file that `tandemrt export triton` writes; write the repository again")
    try:
        deployment = Deployment.read({key: value.string_value for key, value in found.parameters.items()})
        lines += _deployment(folder, deployment, bundle)
    except BadRepository as error:
        lines.append(str(error))
    return lines + (_stub(backends) if backends is not None else [])


def _deployment(folder: Path, deployment: Deployment, expected: Bundle | None) -> list[str]:
    lines = []
    installed = metadata.version("tandemrt")
    if deployment.tandemrt_version != installed:
        lines.append(
            f"tandemrt_version must be {installed}, what is installed here; it is {deployment.tandemrt_version}. "
            "Write the repository again"
        )
    try:
        served = Bundle.read(folder / VERSION / deployment.bundle)
    except BadBundle as error:
        return [*lines, f"bundle: {error}"]
    lines += [f"bundle: {line}" for line in served.problems()]
    lines += [
        f"bundle: engine {name!r} must be built for one of {', '.join(RUNNABLE)}, which this version runs; it is for "
        f"{entry.backend}. Build the bundle with one of those in the recipe's [backend] name"
        for name, entry in served.manifest.engines.items()
        if entry.backend not in RUNNABLE
    ]
    if expected is not None and served.manifest != expected.manifest:
        lines.append(f"bundle must be the one at {expected.folder}; {served.folder} holds another build")
    if deployment.largest_window is not None and deployment.largest_window > served.limits.window:
        lines.append(f"window must be at most the bundle's {served.limits.window}; it is {deployment.largest_window}")
        return lines
    try:
        deployment.require_fit(served.limits)
    except BadRequest as error:
        lines.append(str(error))
    return lines


def _stub(backends: Path) -> list[str]:
    try:
        library = re.search(rb"libpython(\d+\.\d+)\.so", (backends / STUB).read_bytes())
    except OSError as error:
        return [f"{backends / STUB} must be the server's Python stub; {error.strerror}"]
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = library[1].decode() if library else "unknown"
    if found == here:
        return []
    return [f"the server's stub must run Python {here}, where TandemRT is installed; {backends / STUB} runs {found}"]
