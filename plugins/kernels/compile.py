"""From CUDA C++ to cubin and PTX, by NVRTC: no GPU, no driver and no headers are needed.

Every ``NAME.cu`` of this folder becomes one ``NAME.sm_90.cubin`` per architecture, and one ``NAME.ptx`` of the lowest
architecture, which a driver can translate for GPUs newer than the kernels. The ``.cuh`` files beside them can be
included by name.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BackendUnavailable

SOURCES = Path(__file__).parent
ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


@dataclass(frozen=True)
class Compiled:
    """One kernel file for one architecture: ``code`` is a cubin, or PTX text, ``log`` what the compiler said of it."""

    file: str
    code: bytes
    log: str


def compile_kernels(
    architectures: Sequence[str], folder: Path, *, names: Iterable[str] | None = None
) -> tuple[Path, ...]:
    """Write ``folder/NAME.sm_XY.cubin`` for each of ``architectures`` ("9.0", …) and ``folder/NAME.ptx``.

    ``names`` picks files by their stem; None takes all. Returns the paths that were written. Raises
    BackendUnavailable as :func:`compile_kernel` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in kernel_names() if names is None else names:
        for compiled in compile_kernel(name, architectures):
            written.append(folder / compiled.file)
            written[-1].write_bytes(compiled.code)
    return tuple(written)


def compile_kernel(name: str, architectures: Sequence[str]) -> tuple[Compiled, ...]:
    """Compile ``NAME.cu`` to a cubin per architecture, and to PTX for the lowest of them.

    Raises BackendUnavailable if NVRTC is missing or refuses the source (the error carries its log), ValueError for an
    architecture that is not of :data:`ARCHITECTURES`.
    """
    unknown = [a for a in architectures if a not in ARCHITECTURES]
    if unknown or not architectures:
        raise ValueError(f"architectures: one or more of {', '.join(ARCHITECTURES)} are needed, got {architectures}")
    nvrtc = _nvrtc()
    digits = sorted(int(a.replace(".", "")) for a in set(architectures))
    files = {f"{name}.sm_{a}.cubin": f"sm_{a}" for a in digits} | {f"{name}.ptx": f"compute_{digits[0]}"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(partial(_compile, nvrtc, name), files.values())
        return tuple(Compiled(file, *result) for file, result in zip(files, compiled, strict=True))


def compile_ptx(source: str, architecture: str) -> str:
    """Compile CUDA C++ that may include the ``.cuh`` files of this folder to PTX for ``architecture``.

    Raises as :func:`compile_kernel` does.
    """
    code, _ = _translate(_nvrtc(), "source.cu", source.encode(), f"compute_{architecture.replace('.', '')}")
    return code.decode().rstrip("\0")


def kernel_names() -> tuple[str, ...]:
    """The stems of all ``.cu`` files of this folder, in order."""
    return tuple(sorted(path.stem for path in SOURCES.glob("*.cu")))


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"NVRTC is not installed ({error}); it is needed to compile CUDA kernels: pip install 'tandemrt[kernels]'"
        ) from error
    return nvrtc


@cache  # a process that builds several bundles compiles once
def _compile(nvrtc: Any, name: str, target: str) -> tuple[bytes, str]:
    return _translate(nvrtc, f"{name}.cu", (SOURCES / f"{name}.cu").read_bytes(), target)


def _translate(nvrtc: Any, file: str, source: bytes, target: str) -> tuple[bytes, str]:
    """Return cubin (``sm_…``) or PTX (``compute_…``), and the log."""
    headers = sorted(SOURCES.glob("*.cuh"))
    _, program = nvrtc.nvrtcCreateProgram(
        source,
        file.encode(),
        len(headers),
        [header.read_bytes() for header in headers],
        [header.name.encode() for header in headers],
    )
    cubin = target.startswith("sm_")
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17", b"--extra-device-vectorization"]
    options += [b"--ptxas-options=-v"] if cubin else []
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendUnavailable(f"{file}: NVRTC cannot compile it for {target} ({status.name}):\n{log}")
        read = ("CUBIN" if cubin else "PTX") + "{}"
        size, get = (getattr(nvrtc, f"nvrtcGet{read.format(kind)}") for kind in ("Size", ""))
        return _read(program, size, get), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, size: Any, get: Any) -> bytes:
    """Return what the compiler made of ``program``, by the pair of functions that give its length and its bytes."""
    _, length = size(program)
    text: bytes = b" " * length
    get(program, text)
    return text
