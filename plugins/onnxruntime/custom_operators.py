"""Compile the operators that have a C kernel for onnxruntime's CPU provider, and load them into sessions.

The machine's C compiler builds them when they are first needed, into the user's cache folder. Without a compiler a
session runs the ONNX function of an operator, which is slow.
"""

import hashlib
import logging
import platform
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from tandemrt.engines.user_cache import cache_folder, is_private, make_private

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)

ON_CPUS = ("decode_attention", "low_bit_int8_matmul", "tiled_matmul")  # operators of graphs for a CPU alone
OPERATORS = (*ON_CPUS, "residual_norm", "swiglu")  # the last two have kernels for float32 alone
# Without contraction a sum has the same bits in every function that inlines it.
_OPTIONS = ("-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden")
_HAS_AVX2, _WITHOUT_AVX512 = "-DHAS_AVX2", "-DNO_AVX512"
_FOR_AVX2: set[tuple[str, ...]] = {(), (_HAS_AVX2,), (_HAS_AVX2, _WITHOUT_AVX512)}  # libraries that run where AVX2 is
_CPU_INFO = Path("/proc/cpuinfo")  # of Linux; elsewhere the kernels of all processors are compiled
_FOLDER = Path(__file__).parent
_LONGEST = ("low_bit_int8_avx512", "low_bit_int8_avx2", "tiled_matmul", "decode_attention")  # to compile
_OTHERS = ("low_bit_int8_matmul", "low_bit_int8_neon", "residual_norm", "swiglu", "register")
_SOURCES = tuple(f"{name}.c" for name in (*_LONGEST, *_OTHERS))
_LOW_BIT = tuple(f"low_bit_int8{part}.h" for part in ("", "_amx", "_block", "_loads", "_rows"))
_HEADERS = ("attend.h", "avx2.h", "custom_operator.h", *_LOW_BIT, "vectors.h")
_beginning = Lock()
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


def has_kernels() -> bool:
    """Return whether this machine has the compiled kernels, or a C compiler that works.

    The compiler then begins in a thread, so that a build goes on during the seconds that it takes.
    """
    begun = _begun()
    return not begun.done() or begun.result() is not None


def library() -> Path | None:
    """Return the compiled kernels, compiled now if the cache has none; None without a compiler that works.

    A library in the cache needs no compiler, so a cache folder can be copied to a machine that has none, also if that
    machine has another processor.
    """
    return _begun().result()


def _begun() -> "Future[Path | None]":
    with _beginning:
        return _library()


@cache
def _library() -> "Future[Path | None]":
    paths = _paths()
    make_private(paths[0].parent)
    future: Future[Path | None] = Future()
    try:
        if not is_private(paths[0].parent) or any(path.is_file() and not is_private(path) for path in paths):
            future.set_result(None)
        elif paths[0].is_file():
            future.set_result(paths[0])
    except OSError as error:
        _report(paths[0], error)
        future.set_result(None)
    if not future.done():
        _begin_compiling(paths, future)
    return future


def _paths() -> list[Path]:
    """Return the places of the library for this processor, and of those for others that this one can load."""
    sources = [(_FOLDER / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    machine = platform.system(), platform.machine()
    own = _processor_options()
    keys = [
        hashlib.sha256(repr((sources, _OPTIONS, options, *machine)).encode()).hexdigest()
        for options in (own, *(sorted(_FOR_AVX2 - {own}) if own else ()))
    ]
    return [cache_folder() / "custom_operators" / f"{key}.so" for key in keys]


def multiplies_with_avx2() -> bool:
    """Return whether low_bit_int8_matmul uses AVX2 here: AVX-512 needs integer products (VNNI)."""
    return b"avx2" in (known := _processor()) and not {b"avx512f", b"avx512bw", b"avx512_vnni"} <= known


def _processor_options() -> tuple[str, ...]:
    """Return options that leave out kernels for other processors, which take most of the compiler's time."""
    if not {b"avx2", b"fma"} <= (known := _processor()):
        return ()
    return (_HAS_AVX2,) if b"avx512f" in known else (_HAS_AVX2, _WITHOUT_AVX512)


def _processor() -> set[bytes]:
    """Return what Linux says of the first core, extensions of its instructions included."""
    with suppress(OSError), _CPU_INFO.open("rb") as file:
        return {*file.read(8192).split()}
    return set()


def _begin_compiling(paths: Sequence[Path], future: "Future[Path | None]") -> None:
    """Compile the kernels in a thread, which sets ``future``. Without a compiler that works it is set at once."""
    from tandemrt.plugins.onnxruntime.compiler import compile_library, find_compiler  # usually the cache has them

    options = (*_OPTIONS, *_processor_options())
    compiler = find_compiler(_FOLDER / _SOURCES[-1], options)
    if compiler is None:
        future.set_result(next((path for path in paths if path.is_file()), None))
        return

    def run() -> None:
        try:
            sources = [_FOLDER / name for name in _SOURCES]
            future.set_result(compile_library(compiler, sources, paths[0], options))
        except OSError as error:
            _report(paths[0], error)
            future.set_result(None)
        except BaseException as error:  # raised again by ``library``
            future.set_exception(error)

    Thread(target=run, name="compile-kernels").start()


def _report(path: Path, error: OSError) -> None:
    log.warning("kernels for this CPU cannot be compiled into %s: %s", path.parent, error)
