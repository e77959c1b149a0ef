"""Compile C files into a library by the C compiler of this machine."""

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tandemrt.engines.parallel.programs import run_program
from tandemrt.engines.parallel.threads import map_in_threads

log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")  # after $CC
_TIMEOUT_S = 600.0  # a busy machine needs many times the usual seconds


def find_compiler(source: Path, options: Sequence[str]) -> str | None:
    """Return a C compiler that accepts ``source`` with ``options``; None if there is none."""
    wanted = [*filter(None, [os.environ.get("CC")]), *COMPILERS]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is not None:
        try:
            _run(compiler, options, "-fsyntax-only", str(source))
        except subprocess.SubprocessError as error:
            _warn(compiler, error)
            return None
    return compiler


def compile_library(compiler: str, sources: Sequence[Path], path: Path, options: Sequence[str]) -> Path | None:
    """Compile ``sources`` by ``compiler`` into the library ``path`` and return it; None if it cannot.

    They are compiled at once, and give way to the build that goes on meanwhile. Those that take longest come first.
    Raises OSError if ``path`` cannot be written or loaded.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")

    def run(*arguments: str) -> None:
        _run(compiler, options, *arguments)

    try:
        with TemporaryDirectory(dir=path.parent) as folder:
            objects = {source: f"{folder}/{source.stem}.o" for source in sources}
            map_in_threads(lambda source: run("-c", "-o", objects[source], str(source)), sources, os.cpu_count() or 1)
            run("-shared", "-o", str(partial), *objects.values(), "-lm")
        ctypes.CDLL(str(partial))  # raises OSError for another machine's code
        partial.chmod(0o700)
        partial.replace(path)
    except subprocess.SubprocessError as error:
        _warn(compiler, error)
        return None
    finally:
        partial.unlink(missing_ok=True)
    return path


def _run(compiler: str, options: Sequence[str], *arguments: str) -> None:
    nicely = ["nice", "-n", "5"] if shutil.which("nice") else []
    run_program([*nicely, compiler, *options, *arguments], timeout_s=_TIMEOUT_S).check_returncode()


def _warn(compiler: str, error: subprocess.SubprocessError) -> None:
    said = getattr(error, "stderr", None) or str(error)
    log.warning("kernels for this CPU cannot be compiled by %s: %s", compiler, str(said).strip()[-200:])
