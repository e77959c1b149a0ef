"""Compile CUDA C++ to cubin and PTX with NVRTC, without a GPU, a driver or headers.

Every ``NAME.cu`` of this folder becomes one ``NAME.sm_90.cubin`` per compute capability, and one ``NAME.ptx`` for the
lowest of them. The driver compiles the PTX for newer GPUs. A file with instructions that only Hopper has is compiled
for sm_90a, and its PTX for compute_90. Kernels include the ``.cuh`` files of this folder by name, and ``sampling.cuh``,
which sampling_header.py writes. ``variants.cuh`` restricts a compilation to some dtypes and head sizes.
"""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES
from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.plugins.kernels import sampling_header
from tandemrt.plugins.kernels.nvrtc import Program, compile_program
from tandemrt.plugins.operators.constants import HEAD_DIMS, KEY_DIMS

SOURCES = Path(__file__).parent
_SIZES = sorted({*HEAD_DIMS, *KEY_DIMS})  # of heads, for which some file has kernels
_HOPPER, _HOPPER_ONLY = 90, b"__CUDA_ARCH_FEAT_SM90_ALL"  # the macro that sm_90a defines


@dataclass(frozen=True)
class CompiledKernels:
    """One kernel file for one compute capability: ``code`` is a cubin or PTX text, ``log`` the compiler's output."""

    file: str
    code: bytes
    log: str


def compile_kernels(
    compute_capabilities: Sequence[str],
    folder: Path,
    *,
    names: Iterable[str] | None = None,
    dtypes: Collection[str] | None = None,
    head_dims: Collection[int] | None = None,
) -> tuple[Path, ...]:
    """Write ``folder/NAME.sm_XY.cubin`` for each of ``compute_capabilities`` ("9.0", …) and ``folder/NAME.ptx``.

    ``names`` selects files by their stem; None selects all. Returns the paths written. Otherwise as
    :func:`compile_kernel`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in kernel_names() if names is None else names:
        for compiled in compile_kernel(name, compute_capabilities, dtypes=dtypes, head_dims=head_dims):
            written.append(folder / compiled.file)
            written[-1].write_bytes(compiled.code)
    return tuple(written)


def compile_kernel(
    name: str,
    compute_capabilities: Sequence[str],
    *,
    dtypes: Collection[str] | None = None,
    head_dims: Collection[int] | None = None,
) -> tuple[CompiledKernels, ...]:
    """Compile ``NAME.cu`` to a cubin per compute capability, and to PTX for the lowest of them.

    ``dtypes`` ("bfloat16", …) and ``head_dims`` select kernels of the file; None selects all. Raises BackendUnavailable
    if NVRTC is missing or rejects the source (the error carries its log), and ValueError for a compute capability
    outside :data:`COMPUTE_CAPABILITIES` and for a dtype or a head size without kernels.
    """
    unknown = [c for c in compute_capabilities if c not in COMPUTE_CAPABILITIES]
    if unknown or not compute_capabilities:
        known = ", ".join(COMPUTE_CAPABILITIES)
        raise ValueError(f"compute_capabilities: one or more of {known} are needed, got {compute_capabilities}")
    digits = sorted(int(c.replace(".", "")) for c in set(compute_capabilities))
    source = (SOURCES / f"{name}.cu").read_bytes()
    program = Program(f"{name}.cu", source, _included(source), _selection(dtypes, head_dims))
    for_hopper = _HOPPER in digits and any(_HOPPER_ONLY in text for text in (source, *(t for _, t in program.headers)))
    targets = [f"sm_{c}a" if for_hopper and c == _HOPPER else f"sm_{c}" for c in digits]
    if targets[0].endswith("a"):
        targets.append(f"compute_{digits[0]}")  # the PTX of sm_90a does not run on newer GPUs
    results = map_in_threads(partial(compile_program, program), targets, os.cpu_count() or 1)
    cubins = [CompiledKernels(f"{name}.sm_{c}.cubin", r.cubin, r.log) for c, r in zip(digits, results, strict=False)]
    newest = results[len(digits)] if len(results) > len(digits) else results[0]
    return (*cubins, CompiledKernels(f"{name}.ptx", newest.ptx, newest.log))


def compile_ptx(source: str, compute_capability: str) -> str:
    """Compile CUDA C++ that may include the ``.cuh`` files of this folder to PTX for ``compute_capability``.

    Raises as :func:`compile_kernel` does.
    """
    code = source.encode()
    program = Program("source.cu", code, _included(code))
    return compile_program(program, f"compute_{compute_capability.replace('.', '')}").ptx.decode().rstrip("\0")


def kernel_names() -> tuple[str, ...]:
    """Return the stems of all ``.cu`` files of this folder, sorted."""
    return tuple(sorted(path.stem for path in SOURCES.glob("*.cu")))


def _included(source: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the files that ``source`` includes, and those that they include, sorted by name."""
    files: dict[str, bytes] = {}
    texts = [source]
    while texts:
        for name in re.findall(r'^#include "(.+)"', texts.pop().decode(), re.MULTILINE):
            if name == sampling_header.FILE_NAME:
                files[name] = sampling_header.sampling_header()
            elif name not in files and (SOURCES / name).is_file():
                files[name] = (SOURCES / name).read_bytes()
                texts.append(files[name])
    return tuple(sorted(files.items()))


def _selection(dtypes: Collection[str] | None, head_dims: Collection[int] | None) -> tuple[str, ...]:
    """Return the compiler options that make ``variants.cuh`` select these kernels."""
    if dtypes is None and head_dims is None:
        return ()
    dtypes, head_dims = KERNEL_SUFFIX if dtypes is None else dtypes, _SIZES if head_dims is None else head_dims
    for name, wanted, known in (("dtypes", dtypes, sorted(KERNEL_SUFFIX)), ("head_dims", head_dims, _SIZES)):
        if not set(wanted) <= set(known):
            raise ValueError(f"{name}: there are kernels for {', '.join(map(str, known))}, got {list(wanted)}")
    defines = [*(KERNEL_SUFFIX[dtype].upper() for dtype in dtypes), *(f"HEAD_{size}" for size in head_dims)]
    return ("-DSELECTED", *(f"-D{define}=1" for define in sorted(set(defines))))
