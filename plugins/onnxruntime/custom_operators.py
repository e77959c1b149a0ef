"""Compile the operators that have a C kernel for onnxruntime's CPU provider, and load them into sessions.

The machine's C compiler builds them when they are first needed, into the user's cache folder. Without a compiler a
session runs the ONNX function of an operator, which is slow.
"""

import hashlib
import logging
import platform
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from tandemrt.engines.user_cache import cache_folder, is_private, make_private

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)

ON_CPUS = ("decode_attention", "low_bit_int8_matmul", "tiled_matmul")  # operators of graphs for a CPU alone
OPERATORS = (*ON_CPUS, "residual_norm", "swiglu")  # the last two have kernels for float32 alone
# Without contraction a sum has the same bits in every function that inlines it.
_OPTIONS = ("-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden")
_FOLDER = Path(__file__).parent
_SOURCES = (*(f"{operator}.c" for operator in OPERATORS), "register.c")
_HEADERS = ("attend.h", "custom_operator.h", "low_bit_int8_rows.h", "vectors.h")
_compiling = Lock()
_loading = Lock()  # the library makes its domain when it is first loaded, and sessions open in several threads


def load_into(options: "onnxruntime.SessionOptions", graph: Path | bytes) -> None:
    """Load the kernels into ``options`` if ``graph``, a graph file or its bytes, has operators of ``ON_CPUS``."""
    data = graph if isinstance(graph, bytes) else graph.read_bytes()
    if any(operator.encode() in data for operator in ON_CPUS):
        load(options)


def load(options: "onnxruntime.SessionOptions") -> None:
    """Load the kernels into ``options``; log a warning without a compiler."""
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
    sources = [(_FOLDER / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    key = hashlib.sha256(repr((sources, _OPTIONS, platform.system(), platform.machine())).encode()).hexdigest()
    path = cache_folder() / "custom_operators" / f"{key}.so"
    make_private(path.parent)
    try:
        if not is_private(path.parent):
            return None
        if path.is_file():
            return path if is_private(path) else None
        from tandemrt.plugins.onnxruntime.compiler import compile_library  # usually the cache has it

        return compile_library([_FOLDER / name for name in _SOURCES], path, _OPTIONS)
    except OSError as error:
        log.warning("kernels for this CPU cannot be compiled into %s: %s", path.parent, error)
        return None
