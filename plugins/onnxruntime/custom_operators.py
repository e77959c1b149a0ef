"""Compile the operators that have a C kernel for onnxruntime's CPU provider, and load them into sessions.

The machine's C compiler builds them when they are first needed, into the user's cache folder. Without a compiler a
session runs the ONNX function of an operator, which is slow.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING

from tandemrt.engines.parallel import map_in_threads
from tandemrt.engines.user_cache import cache_folder, is_private, make_private

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)

OPERATORS = ("int4_int8_matmul", "tiled_matmul")
COMPILERS = ("cc", "gcc", "clang")  # after $CC
# Without contraction a sum has the same bits in every function that inlines it.
_OPTIONS = ("-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden")
_TIMEOUT_S = 120.0
_FOLDER = Path(__file__).parent
_SOURCES = ("int4_int8_matmul.c", "tiled_matmul.c", "register.c")
_HEADER = "custom_operator.h"
_compiling = Lock()
_loading = Lock()  # the library makes its domain when it is first loaded, and sessions open in several threads


def load_into(options: "onnxruntime.SessionOptions", graph: Path | bytes) -> None:
    """Load the kernels of the operators that ``graph`` uses, a graph file or its bytes, into ``options``."""
    data = graph if isinstance(graph, bytes) else graph.read_bytes()
    if not any(operator.encode() in data for operator in OPERATORS):
        return
    if (path := library()) is not None:
        with _loading:
            options.register_custom_ops_library(str(path))
    else:
        log.warning(
            "matmuls run without their kernel, many times slower: no C compiler was found. Install one, name it in CC, "
            "or build the bundle on a machine without a compiler, which uses kernels of onnxruntime"
        )


def library() -> Path | None:
    """Return the compiled kernels, compiled now if the cache has none; None without a compiler that works.

    A library in the cache needs no compiler, so a cache folder can be copied to a machine that has none.
    """
    with _compiling:
        return _library()


@cache
def _library() -> Path | None:
    sources = [(_FOLDER / name).read_bytes() for name in (*_SOURCES, _HEADER)]
    key = hashlib.sha256(repr((sources, _OPTIONS, platform.system(), platform.machine())).encode()).hexdigest()
    path = cache_folder() / "custom_operators" / f"{key}.so"
    make_private(path.parent)
    try:
        if not is_private(path.parent):
            return None
        if path.is_file():
            return path if is_private(path) else None
        return _compile(path)
    except OSError as error:
        log.warning("kernels for this CPU cannot be compiled into %s: %s", path.parent, error)
        return None


def _compile(path: Path) -> Path | None:
    wanted = [*filter(None, [os.environ.get("CC")]), *COMPILERS]
    compiler = next((found for name in wanted if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    partial = path.with_name(f"{path.name}.{os.getpid()}")

    def run(*arguments: str) -> None:
        command = [compiler, *_OPTIONS, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)

    try:
        with TemporaryDirectory(dir=path.parent) as folder:
            objects = {name: f"{folder}/{name}.o" for name in _SOURCES}
            map_in_threads(lambda name: run("-c", "-o", objects[name], str(_FOLDER / name)), _SOURCES, len(_SOURCES))
            run("-shared", "-o", str(partial), *objects.values(), "-lm")
        ctypes.CDLL(str(partial))  # raises OSError for another machine's code
        partial.chmod(0o700)
        partial.replace(path)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("kernels for this CPU cannot be compiled by %s: %s", compiler, str(said).strip()[-200:])
        return None
    finally:
        partial.unlink(missing_ok=True)
    return path
