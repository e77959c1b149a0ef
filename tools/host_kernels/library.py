"""Compile kernels for a CPU and pass them arrays."""

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tandemrt.plugins.kernels.compile import SOURCES
from tools.host_kernels.translate import translated

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
THREADS = 256  # of a block
_LAUNCHERS = Path(__file__).parent / "launchers.h"


def compiled(name: str, folder: Path) -> Any:
    """Return the library of ``NAME.cu``, compiled into ``folder``."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(translated(SOURCES / f"{name}.cu") + _LAUNCHERS.read_text())
    options = ("-std=c++17", "-O1", "-w", "-mavx2", "-mf16c", "-shared", "-fPIC")
    subprocess.run(("g++", *options, str(source), "-o", str(library)), check=True)
    return ctypes.CDLL(str(library))


def allow(library: Any, tensors: Iterable[np.ndarray]) -> None:
    """Let kernels read ``tensors``, and nothing else."""
    library.forget()
    for tensor in tensors:
        library.allow(address(tensor), ctypes.c_size_t(tensor.nbytes))


def at_end(tensor: np.ndarray) -> np.ndarray:
    """Return a copy that is aligned as on a GPU."""
    memory = np.empty(tensor.nbytes + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    copied = memory[begin : begin + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
    copied[...] = tensor
    return copied


def address(tensor: np.ndarray) -> ctypes.c_void_p:
    """Return the address of the first element."""
    return ctypes.c_void_p(tensor.ctypes.data)


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether both have the same bits."""
    return one.tobytes() == other.tobytes()
