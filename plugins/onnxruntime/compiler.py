"""Compile C files into a library by the C compiler of this machine."""

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tandemrt.engines.parallel import map_in_threads

log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")  # after $CC
_TIMEOUT_S = 600.0  # a busy machine needs many times the usual seconds


def compile_library(sources: Sequence[Path], path: Path, options: Sequence[str]) -> Path | None:
    """Compile ``sources`` into the library ``path`` and return it; None without a compiler that works.

    Raises OSError if ``path`` cannot be written or loaded.
    """
    wanted = [*filter(None, [os.environ.get("CC")]), *COMPILERS]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is None:
        return None
    partial = path.with_name(f"{path.name}.{os.getpid()}")

    def run(*arguments: str) -> None:
        command = [compiler, *options, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)

    try:
        with TemporaryDirectory(dir=path.parent) as folder:
            objects = {source: f"{folder}/{source.stem}.o" for source in sources}
            map_in_threads(lambda source: run("-c", "-o", objects[source], str(source)), sources, len(sources))
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
