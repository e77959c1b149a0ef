"""What building and running share about TensorRT and TensorRT-RTX: two Python modules with one API.

Neither is imported before it is asked for, so a bundle can be looked into without them.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from tandemrt.engines.errors import BackendUnavailable, BadRecipe


class Library(NamedTuple):
    """``module`` is what Python imports; engines and plugins are written for ``major``, tested as ``tested`` says."""

    module: str
    major: int
    tested: str


LIBRARIES = {
    "tensorrt": Library("tensorrt", 11, "11.4"),
    "tensorrt-rtx": Library("tensorrt_rtx_bindings", 1, "1.7"),
}


def load(backend: str) -> ModuleType:
    """Import the module of ``backend``.

    Raises BadRecipe for another backend, and BackendUnavailable, with the command that installs it, when the module is
    missing or of another major version.
    """
    if backend not in LIBRARIES:
        raise BadRecipe(f"backend must be one of {', '.join(LIBRARIES)}; got {backend!r}; choose one of them")
    library = LIBRARIES[backend]
    try:
        module = importlib.import_module(library.module)
    except (ImportError, OSError) as error:  # OSError: the bindings are there, a library they load is not
        raise BackendUnavailable(
            f"backend {backend} needs the module {library.module}, which cannot be imported ({error}); "
            f"{install(backend)}"
        ) from error
    require_version(backend, module.__version__)
    return module


def require_version(backend: str, version: str) -> None:
    """Raise BackendUnavailable unless ``version``, "11.4.0.63", is of the major version written for."""
    library = LIBRARIES[backend]
    if version.split(".")[0] != str(library.major):
        raise BackendUnavailable(
            f"backend {backend} must be version {library.major} (tested: {library.tested}); got {version}; "
            f"{install(backend)}"
        )


def install(backend: str) -> str:
    """The command that installs a backend."""
    return f"pip install 'tandemrt[{backend}]'"


@cache
def logger(module: ModuleType) -> Any:
    """The process's one logger for ``module``: it keeps the errors.

    One for all, because TensorRT reports to the first logger that it was given. ``forget()`` before an operation,
    ``said()`` after it: everything it complained of, in one line, and what to do about what is known.
    """

    class Logger(module.ILogger):  # type: ignore[misc, name-defined]  # the base exists only where TensorRT is installed
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.INTERNAL_ERROR, module.ILogger.ERROR):
                self.errors.append(message.strip())

        def forget(self) -> None:
            self.errors.clear()

        def said(self) -> str:
            said = "; ".join(dict.fromkeys(self.errors)) or f"{module.__name__} gave no reason"
            fixes = dict.fromkeys(fix for phrase, fix in _FIXES if phrase.lower() in said.lower())
            return "; ".join((said, *fixes))

    return Logger()


# What TensorRT 11 and TensorRT-RTX 1.7 say, and what helps.
_FIXES = (
    ("dedicated kernel", "attention compiles in float16 and bfloat16, for head sizes that have a kernel"),
    ("HW-specific datatypes: b16", "bfloat16 needs compute capability 8.0: drop 7.5 from compute_capabilities"),
    ("Plugin not found", "a node that is neither an ONNX operator nor a plugin of TandemRT: build the graph again"),
    ("could not find plugin", "the engine asks for a plugin that is not registered here: build the bundle again"),
    ("could not find any implementation", "raise or drop backend.workspace_mib, or raise backend.optimization_level"),
    ("insufficient workspace", "raise or drop backend.workspace_mib"),
    ("out of memory", "free memory on the GPU, or lower limits.batch or limits.length"),
    ("OutOfMemory", "free memory on the GPU, or lower limits.batch or limits.length"),
    ("live inputs, got", "a known defect of TensorRT's attention (docs/tensorrt.md); use the release tested there"),
    ("incompatible serialization version", "the file is no engine of this version: build the bundle again"),
    ("Serialization assertion", "the engine is damaged or of another version: build the bundle again"),
    ("Version tag does not match", "the engine is of another version: build the bundle again with this one"),
    ("CUDA driver version is insufficient", "install an NVIDIA driver for CUDA 13"),
)
