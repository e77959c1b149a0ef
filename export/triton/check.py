"""Check that this version of TandemRT can serve a model repository, before a server starts."""

import re
import sys
from importlib import metadata
from pathlib import Path

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.errors import BadBundle, BadRepository, BadRequest
from tandemrt.export.triton import config
from tandemrt.export.triton.repository import MODEL_FILE, VERSION

STUB = "python/triton_python_backend_stub"


def problems(folder: Path, *, bundle: Bundle | None = None, backends: Path | None = None) -> list[str]:
    """Return the reasons, one line each, why the model in ``folder`` cannot be served as written; [] if it can.

    ``bundle``: the bundle that the model should serve, if given. ``backends``: the server's backend directory; if
    given, the Python version of its stub is compared with the running Python.
    """
    try:
        model_config = config.read_config(folder / config.FILE_NAME)
    except BadRepository as error:
        return [str(error)]
    lines = config.differences(model_config, config.model_config(folder.name, parameters={}))
    model = folder / VERSION / "model.py"
    try:
        written = model.read_bytes() == MODEL_FILE.encode()
    except OSError as error:
        lines.append(f"{model} must be a readable file; {error.strerror}. Write the repository again")
    else:
        if not written:
            lines.append(f"{model} must be the file that `tandemrt export triton` writes; write the repository again")
    try:
        deployment = Deployment.read({key: value.string_value for key, value in model_config.parameters.items()})
        lines += _deployment(folder, deployment, bundle)
    except BadRepository as error:
        lines.append(str(error))
    return lines + (_stub(backends) if backends is not None else [])


def _deployment(folder: Path, deployment: Deployment, expected: Bundle | None) -> list[str]:
    lines = []
    installed = metadata.version("tandemrt")
    if deployment.tandemrt_version != installed:
        lines.append(
            f"tandemrt_version must be {installed}, the installed version; it is {deployment.tandemrt_version}. "
            "Write the repository again"
        )
    try:
        served = Bundle.read(folder / VERSION / deployment.bundle)
    except BadBundle as error:
        return [*lines, f"bundle: {str(error).removeprefix('bundle: ')}"]
    lines += [f"bundle: {line}" for line in served.problems()]
    lines += [
        f"bundle: engine {name!r} must be built for one of {', '.join(BACKENDS)}, which this version runs; it is for "
        f"{entry.backend}. Build the bundle with one of those in the recipe's [backend] name"
        for name, entry in served.manifest.engines.items()
        if entry.backend not in BACKENDS
    ]
    if expected is not None and served.manifest != expected.manifest:
        lines.append(f"bundle must be the one at {expected.folder}; {served.folder} holds another build")
    most, requested = served.limits.num_draft_tokens, deployment.max_draft_tokens
    if requested is not None and requested > most:
        lines.append(f"num_draft_tokens must be at most the bundle's {most}; it is {requested}")
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
    installed = f"{sys.version_info.major}.{sys.version_info.minor}"
    linked = library[1].decode() if library else "unknown"
    if linked == installed:
        return []
    return [
        f"the server's stub must run Python {installed}, where TandemRT is installed; {backends / STUB} runs {linked}"
    ]
