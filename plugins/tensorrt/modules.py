"""Load TensorRT and TensorRT-RTX, two Python modules with one API, for the exporter and the runtime.

Each is imported on first use, so a bundle can be inspected without them.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from tandemrt.engines.recipe.backend import Library
from tandemrt.engines.recipe.backends import BACKENDS, library_of
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.engines.validation.extras import pip_install


def load(backend: str) -> ModuleType:
    """Import the first module of ``backend`` that is installed and runs its engines.

    Raises:
        BadRecipe: the backend has no TensorRT library.
        BackendUnavailable: no module is installed, or all have another major version; the message has the install
            commands.
    """
    library, versions, missing = _library(backend), {}, {}
    for name in library.modules:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library that the bindings load is missing
            missing[name] = error
            continue
        if _major(module.__version__) in library.runs:
            return module
        versions[name] = module.__version__
    for name, version in versions.items():
        require_version(backend, version, library.runs, name)
    first = missing[library.builder]
    raise BackendUnavailable(
        f"backend {backend} needs the module {' or '.join(library.modules)}, which cannot be imported ({first}); "
        f"{install(backend)}"
    ) from first


def load_builder(backend: str) -> ModuleType:
    """Import the module of ``backend`` that builds engines. Raises as ``load`` does."""
    library = _library(backend)
    try:
        module = importlib.import_module(library.builder)
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"backend {backend} needs the module {library.builder}, which cannot be imported ({error}); "
            f"{pip_install(library.extras[0])}"
        ) from error
    require_version(backend, module.__version__, library.builds)
    return module


def require_version(backend: str, version: str, majors: tuple[int, ...], module: str | None = None) -> None:
    """Raise BackendUnavailable unless ``version`` ("11.4.0.63") has one of the ``majors``."""
    if _major(version) not in majors:
        wanted, where = " or ".join(map(str, majors)), f" of {module}" if module else ""
        raise BackendUnavailable(
            f"backend {backend} must be version {wanted} (tested: {_library(backend).tested}); got {version}{where}; "
            f"{install(backend)}"
        )


def install(backend: str) -> str:
    """Return the commands that install a backend, or only what runs its engines."""
    return pip_install(*_library(backend).extras)


def opens(backend: str, version: str) -> str:
    """Return the plans of other releases that release ``version`` opens."""
    return _library(backend).opens[_major(version)]


def _library(backend: str) -> Library:
    library = library_of(backend)
    if library is None:
        known = ", ".join(name for name, row in BACKENDS.items() if row.library)
        raise BadRecipe(f"backend must be one of {known}; got {backend!r}; choose one of them")
    return library


def _major(version: str) -> int:
    return int(version.split(".")[0])


def with_advice(errors: str) -> str:
    """Return TensorRT's ``errors`` with the remedies of those that are known."""
    fixes = dict.fromkeys(fix for phrase, fix in _FIXES if phrase.lower() in errors.lower())
    return "; ".join((errors, *fixes))


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
            return with_advice("; ".join(dict.fromkeys(self.errors)) or f"{module.__name__} gave no reason")

    return Logger()


# Phrases in errors of TensorRT 8.6 to 11 and TensorRT-RTX 1.7, and the remedies.
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
    (
        "Forward Compatibility supported starting TensorRT 10",  # 11.4 about a plan of 8.6
        "TensorRT 10 opens it: pip install 'tensorrt-lean-cu13-bindings<11' 'tensorrt-lean-cu13-libs<11'; or build the "
        "bundle again with TensorRT 10 or later",
    ),
    (
        "data type: BFLOAT16",
        "TensorRT before 10 has no bfloat16: store the checkpoint in float16 or float32, or build with a later release",
    ),
    ("Serialization assertion", "the engine is damaged or of another version: build the bundle again"),
    ("Version tag does not match", "the engine is of another version: build the bundle again with this one"),
    ("CUDA driver version is insufficient", "install an NVIDIA driver for CUDA 13"),
)
