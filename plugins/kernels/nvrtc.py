"""NVRTC, the compiler of CUDA C++ as a library: a program in, a cubin and PTX out, each made once (cache.py)."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.plugins.kernels.compile_cache import keep, key_of, load

_OPTIONS = ("--std=c++17", "--extra-device-vectorization")


@dataclass(frozen=True)
class Program:
    """``headers`` are names and contents of what ``source`` may include, ``defines`` options like ``-DX=1``."""

    file: str
    source: bytes
    headers: tuple[tuple[str, bytes], ...]
    defines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """``cubin`` is empty for a virtual architecture; ``log`` says what each kernel needs for a real one."""

    cubin: bytes
    ptx: bytes
    log: str


@cache  # where nothing can be kept on disk, a process that builds several bundles still compiles once
def compile_program(program: Program, target: str) -> Result:
    """Compile for ``sm_90`` (cubin and PTX) or ``compute_90`` (PTX).

    Raises BackendUnavailable if NVRTC is missing or refuses the source.
    """
    nvrtc = _nvrtc()
    options = (f"--gpu-architecture={target}", *_OPTIONS, *program.defines)
    options = (*options, "--ptxas-options=-v") if target.startswith("sm_") else options
    texts = [_version(nvrtc), program.file, *options, *(name for name, _ in program.headers)]
    contents = [program.source, *(content for _, content in program.headers)]
    key = key_of([*(text.encode() for text in texts), *contents])
    if (found := load(key)) is not None and len(found) == 3:
        return Result(found[0], found[1], found[2].decode())
    result = _compile(nvrtc, program, target, options)
    keep(key, (result.cubin, result.ptx, result.log.encode()))
    return result


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"NVRTC is not installed ({error}); it is needed to compile CUDA kernels: pip install 'tandemrt[kernels]'"
        ) from error
    return nvrtc


def _version(nvrtc: Any) -> str:
    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return str(nvrtc.nvrtcVersion())  # no more than 13.0


def _compile(nvrtc: Any, program: Program, target: str, options: tuple[str, ...]) -> Result:
    names, contents = [name.encode() for name, _ in program.headers], [content for _, content in program.headers]
    _, made = nvrtc.nvrtcCreateProgram(program.source, program.file.encode(), len(names), contents, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(made, len(options), [option.encode() for option in options])
        log = _read(made, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendUnavailable(f"{program.file}: NVRTC cannot compile it for {target} ({status.name}):\n{log}")
        cubin = _read(made, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Result(cubin, _read(made, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log)
    finally:
        nvrtc.nvrtcDestroyProgram(made)


def _read(program: Any, size: Any, get: Any) -> bytes:
    """Return what the compiler made of ``program``, by the pair of functions that give its length and its bytes."""
    _, length = size(program)
    text = bytearray(length)  # not bytes: those of length 1 are shared by the whole process, and would be written into
    get(program, text)
    return bytes(text)
