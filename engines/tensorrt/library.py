"""Load TensorRT and TensorRT-RTX, two Python modules with one API, for the exporter and the runtime.

Each is imported on first use, so a bundle can be inspected without them.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe


class Library(NamedTuple):
    """A TensorRT library.

    Attributes:
        module: name of the Python module.
        major: major version that engines and plugins are written for.
        tested: version that the tests run with.
    """

    module: str
    major: int
    tested: str


LIBRARIES = {
    "tensorrt": Library("tensorrt", 11, "11.4"),
    "tensorrt-rtx": Library("tensorrt_rtx_bindings", 1, "1.7"),
}


def load(backend: str) -> ModuleType:
    """Import the module of ``backend``.

    Raises:
        BadRecipe: the backend has no TensorRT library.
        BackendUnavailable: the module is missing or of another major version; the message has the install command.
    """
    if backend not in LIBRARIES:
        raise BadRecipe(f"backend must be one of {', '.join(LIBRARIES)}; got {backend!r}; choose one of them")
    library = LIBRARIES[backend]
    try:
        module = importlib.import_module(library.module)
    except (ImportError, OSError) as error:  # OSError: a library that the bindings load is missing
        raise BackendUnavailable(
            f"backend {backend} needs the module {library.module}, which cannot be imported ({error}); "
            f"{install(backend)}"
        ) from error
    require_version(backend, module.__version__)
    return module


def require_version(backend: str, version: str) -> None:
    """Raise BackendUnavailable unless ``version`` ("11.4.0.63") has the supported major version."""
    library = LIBRARIES[backend]
    if version.split(".")[0] != str(library.major):
        raise BackendUnavailable(
            f"backend {backend} must be version {library.major} (tested: {library.tested}); got {version}; "
            f"{install(backend)}"
        )


def install(backend: str) -> str:
    """Return the command that installs a backend."""
    return f"pip install 'tandemrt[{backend}]'"


@cache
def logger(module: ModuleType) -> Any:
    """Return the process's only logger for ``module``, which collects errors.

    There is one logger because TensorRT reports to the first logger that it received. Call ``clear()`` before an
    operation and ``summary()`` after it: one line with all errors, and the remedies for known ones.
    """

    class Logger(module.ILogger):  # type: ignore[misc, name-defined]  # the base exists only where TensorRT is installed
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.INTERNAL_ERROR, module.ILogger.ERROR):
                self.errors.append(message.strip())

        def clear(self) -> None:
            self.errors.clear()

        def summary(self) -> str:
            errors = "; ".join(dict.fromkeys(self.errors)) or f"{module.__name__} gave no reason"
            fixes = dict.fromkeys(fix for phrase, fix in _FIXES if phrase.lower() in errors.lower())
            return "; ".join((errors, *fixes))

    return Logger()


# Phrases in errors of TensorRT 11 and TensorRT-RTX 1.7, and the remedies.
_FIXES = (
    ("dedicated kernel", "attention compiles in float16 and bfloat16, for head sizes that have a kernel"),
    ("HW-specific datatypes: b16", "bfloat16 needs compute capability 8.0: drop 7.5 from compute_capabilities"),
    (
        "Plugin not found",
        "the graph has a node that is neither an ONNX operator nor a plugin of TandemRT: build the graph again",
    ),
    ("could not find plugin", "the engine needs a plugin that is not registered: build the bundle again"),
    ("could not find any implementation", "raise or drop backend.workspace_mib, or raise backend.optimization_level"),
    ("insufficient workspace", "raise or drop backend.workspace_mib"),
    ("out of memory", "free memory on the GPU, or lower limits.batch or limits.length"),
    ("OutOfMemory", "free memory on the GPU, or lower limits.batch or limits.length"),
    ("live inputs, got", "a known defect of TensorRT's attention (docs/tensorrt.md); use the release tested there"),
    ("incompatible serialization version", "the file is not an engine of this version: build the bundle again"),
    ("Serialization assertion", "the engine is damaged or of another version: build the bundle again"),
    ("Version tag does not match", "the engine is of another version: build the bundle again with this one"),
    ("CUDA driver version is insufficient", "install an NVIDIA driver for CUDA 13"),
)
