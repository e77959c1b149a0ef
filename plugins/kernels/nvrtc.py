"""Compile CUDA C++ to cubin and PTX with NVRTC, with a disk cache (compile_cache.py)."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.kernels.compile_cache import key_of, load, store

_OPTIONS = ("--std=c++17", "--extra-device-vectorization")


@dataclass(frozen=True)
class Program:
    """CUDA C++ source; ``headers`` maps names to contents for its includes, ``defines`` are options like ``-DX=1``."""

    file: str
    source: bytes
    headers: tuple[tuple[str, bytes], ...]
    defines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Compiler output. ``cubin`` is empty for a virtual architecture; ``log`` lists the resources of each kernel."""

    cubin: bytes
    ptx: bytes
    log: str


@cache  # a process that builds several bundles compiles once even without a disk cache
def compile_program(program: Program, target: str) -> Result:
    """Compile for ``sm_90`` (cubin and PTX) or ``compute_90`` (PTX).

    Raises BackendUnavailable if NVRTC is missing or rejects the source.
    """
    nvrtc = _nvrtc()
    options = (f"--gpu-architecture={target}", *_OPTIONS, *program.defines)
    options = (*options, "--ptxas-options=-v") if target.startswith("sm_") else options
    texts = [_version(nvrtc), program.file, *options, *(name for name, _ in program.headers)]
    contents = [program.source, *(content for _, content in program.headers)]
    key = key_of([*(text.encode() for text in texts), *contents])
    if (cached := load(key)) is not None and len(cached) == 3:
        return Result(cached[0], cached[1], cached[2].decode())
    result = _compile(nvrtc, program, target, options)
    store(key, (result.cubin, result.ptx, result.log.encode()))
    return result


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"NVRTC is not installed ({error}); it is needed to compile CUDA kernels: {pip_install('kernels')}"
        ) from error
    return nvrtc


def _version(nvrtc: Any) -> str:
    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return str(nvrtc.nvrtcVersion())  # only 13.0, without a patch number


def _compile(nvrtc: Any, program: Program, target: str, options: tuple[str, ...]) -> Result:
    names, contents = [name.encode() for name, _ in program.headers], [content for _, content in program.headers]
    _, handle = nvrtc.nvrtcCreateProgram(program.source, program.file.encode(), len(names), contents, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        log = _read(handle, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendUnavailable(f"{program.file}: NVRTC cannot compile it for {target} ({status.name}):\n{log}")
        cubin = _read(handle, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Result(cubin, _read(handle, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _read(program: Any, size: Any, get: Any) -> bytes:
    """Return an output of ``program``; ``size`` and ``get`` are NVRTC's functions for its length and its bytes."""
    _, length = size(program)
    text = bytearray(length)  # not bytes: the process shares objects of length 1, and NVRTC would write into them
    get(program, text)
    return bytes(text)
