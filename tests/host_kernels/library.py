"""Compile kernels for a CPU and pass them arrays."""

import ctypes
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tandemrt.plugins.kernels.compile import SOURCES
from tests.host_kernels.translate import translated

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
THREADS = 256  # of a block
_LAUNCHERS = Path(__file__).parent / "launchers.h"


def compiled(name: str, folder: Path, defines: Iterable[str] = ()) -> Any:
    """Return the library of ``NAME.cu``, compiled into ``folder``; ``defines`` select kernels (variants.cuh)."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(translated(SOURCES / f"{name}.cu") + _LAUNCHERS.read_text())
    options = ("-std=c++17", "-O1", "-w", "-mavx2", "-mf16c", "-shared", "-fPIC", *(f"-D{each}" for each in defines))
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


def weight_addresses(tensors: Mapping[str, np.ndarray], name: str, of: str = "") -> list[ctypes.c_void_p | None]:
    """Return those of the numbers ``name``, and of the scales and the zero points or factors that begin with ``of``."""
    more = tensors.get(f"{of}zeros", tensors.get(f"{of}factors"))
    return [None if each is None else address(each) for each in (tensors[name], tensors[f"{of}scales"], more)]


def numbers_of(arguments: Iterable[Any]) -> Any:
    """Return arguments of a kernel for ``call``: arrays, addresses, None, and integers."""

    def number(argument: Any) -> int:
        if isinstance(argument, np.ndarray):
            return argument.ctypes.data
        return (argument.value if isinstance(argument, ctypes.c_void_p) else argument) or 0

    return (ctypes.c_uint64 * 32)(*map(number, arguments))


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether both have the same bits."""
    return one.tobytes() == other.tobytes()


def require_near(result: np.ndarray, exact: np.ndarray, what: str, within: float = 2.0**-7) -> None:
    """Raise AssertionError unless ``result`` is ``exact`` but for rounding to 16 bits: ``within`` a share of it."""
    error = np.abs(result.astype(np.float64) - exact)
    assert (error <= within * (np.abs(exact) + np.abs(exact).mean())).all(), f"{what}: results differ"


def items(pairs: Sequence[int], most: int) -> np.ndarray:
    """Return {expert, first place, pairs, 0} of items of at most ``most`` of the ``pairs`` of each expert."""
    all_items, first = [], 0
    for expert, count in enumerate(pairs):
        all_items += [(expert, first + at, min(most, count - at), 0) for at in range(0, count, most)]
        first += count
    return at_end(np.array(all_items, np.int32))
