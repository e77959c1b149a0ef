"""Run the CUDA kernels of low-bit matmuls on a CPU and compare them with their definitions, bit by bit where exact.

    python -m tools.host_kernels                    # int4, int8 and float4, in bfloat16 and float16

The kernels' source is compiled by g++ for x86-64 with AVX2. Compared are: results with numpy's, the bits of a row with
those among other numbers of rows and in clusters of two blocks, dequantized weights. Reads out of bounds and reads that
are not aligned end the process. This shows neither speed nor what a GPU's compiler makes of the source.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer

from tandemrt.plugins.implementations import reference
from tandemrt.plugins.kernels.compile import SOURCES
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.int4_layout import GROUP_SIZES, padded_inner, scales_of_output
from tools.host_kernels.translate import translated

_DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
_SIZES = ((8, 128), (56, 1120), (40, 32), (24, 192))  # outputs and inputs
_ROWS = (1, 5, 8, 9, 16, 17, 33, 64)
_THREADS, _PITCH = 256, 36  # of a block; floats of a row of partial sums
_GROUPS = {"int4": GROUP_SIZES, "int8": GROUP_SIZES, "float4": float4.GROUP_SIZES}
_LAUNCHERS = Path(__file__).parent / "launchers.h"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Kernel files: int4, int8, float4. Default: all.")] = None,
) -> None:
    """Compare the kernels with their definitions."""
    for name in names or _GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            library, count = _compiled(name, Path(folder)), 0
            for case in _cases(name):
                case.check(library)
                count += 1
        print(f"{name}: {count} cases agree", flush=True)


@dataclass(frozen=True)
class _Case:
    """Operands of the matmul ``name`` for the most rows, in arrays that end where the memory does."""

    name: str
    dtype: str
    group: int
    tensors: Mapping[str, np.ndarray]

    @property
    def width(self) -> int:
        return len(self.tensors["weight"])

    @property
    def inner(self) -> int:
        return int(self.tensors["x"].shape[1])

    @property
    def suffix(self) -> str:
        return f"{'_zeros' if 'zeros' in self.tensors else ''}_{self.dtype}"

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        what = f"{self.name} {self.dtype}, groups of {self.group}, {self.width} x {self.inner}, {sorted(self.tensors)}"
        expected = self._defined(self.tensors["x"])
        found = self._matmul(library, _ROWS[-1], 1)
        near = np.abs(found.astype(np.float64) - expected) <= 2.0**-7 * (np.abs(expected) + np.abs(expected).mean())
        assert near.all(), f"{what}: results differ"
        for rows in _ROWS:
            assert _equal(self._matmul(library, rows, 1), found[:rows]), f"{what}: {rows} rows have other bits"
        if self.inner <= 1024:  # of more, two blocks add in another order
            assert _equal(self._matmul(library, 5, 2), found[:5]), f"{what}: a cluster has other bits"
        weight = self._defined(np.eye(self.inner)).T.astype(np.float32).astype(_DTYPES[self.dtype])
        assert (self._weights(library) == weight).all(), f"{what}: dequantized weights differ"

    def _defined(self, x: np.ndarray) -> np.ndarray:
        exact = {n: a.astype(np.float64) if a.dtype == _DTYPES[self.dtype] else a for n, a in self.tensors.items()}
        result: np.ndarray = reference(f"{self.name}_matmul")(
            **exact | {"x": x.astype(np.float64)}, group_size=self.group
        )
        return result

    def _matmul(self, library: Any, rows: int, blocks: int) -> np.ndarray:
        tile = next(each for each in (8, 16, 32, 64) if rows <= each)
        x, out = _at_end(self.tensors["x"][:rows]), np.zeros((rows, self.width), _DTYPES[self.dtype])
        self._allow(library, x)
        library.matmul(
            *(getattr(library, f"matmul_{tile}{self.suffix}"), _address(x), *self._addresses(), rows, self.width),
            *(self.inner, _GROUPS[self.name].index(self.group), _address(out), -(-self.width // 32), blocks),
            4 * _THREADS // 32 * tile * _PITCH,
        )
        return out

    def _weights(self, library: Any) -> np.ndarray:
        out, weight = np.zeros((self.width, self.inner), _DTYPES[self.dtype]), self.tensors["weight"]
        self._allow(library)
        library.weights(
            *(getattr(library, f"weights{self.suffix}"), *self._addresses(), self.width, self.inner),
            *(_GROUPS[self.name].index(self.group), _address(out), -(-weight.nbytes // 16 // _THREADS)),
        )
        return out

    def _allow(self, library: Any, *more: np.ndarray) -> None:
        library.forget()
        for tensor in (*self.tensors.values(), *more):
            library.allow(_address(tensor), ctypes.c_size_t(tensor.nbytes))

    def _addresses(self) -> tuple[ctypes.c_void_p | None, ...]:
        more = self.tensors.get("zeros", self.tensors.get("factors"))
        parts = (self.tensors["weight"], self.tensors["scales"], more)
        return tuple(None if part is None else _address(part) for part in parts)


def _cases(name: str) -> Iterator[_Case]:
    for seed, (dtype, kind) in enumerate(_DTYPES.items()):
        rng = np.random.default_rng(seed)
        for group in _GROUPS[name]:
            for width, inner in _SIZES:
                count, stored = scales_of_output(inner, group), padded_inner(inner) // (1 if name == "int8" else 2)
                tensors = {"x": rng.normal(size=(_ROWS[-1], inner)).astype(kind)}
                tensors["weight"] = rng.integers(0, 256, (width, stored), dtype=np.uint8)
                if name == "float4":
                    tensors["scales"] = rng.integers(0, 127, (width, count), dtype=np.uint8)  # all that are finite
                    tensors["factors"] = (rng.uniform(0.5, 2, width) / 100 / inner**0.5).astype(np.float32)
                else:
                    tensors["scales"] = (rng.uniform(0.002, 0.006, (width, count)) / inner**0.5).astype(kind)
                tensors = {key: _at_end(tensor) for key, tensor in tensors.items()}
                yield _Case(name, dtype, group, tensors)
                if name == "int4":
                    zeros = _at_end(rng.integers(0, 256, (width, count // 2), dtype=np.uint8))
                    yield _Case(name, dtype, group, tensors | {"zeros": zeros})


def _compiled(name: str, folder: Path) -> Any:
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(translated(SOURCES / f"{name}.cu") + _LAUNCHERS.read_text())
    options = ("-std=c++17", "-O1", "-w", "-mavx2", "-mf16c", "-shared", "-fPIC")
    subprocess.run(("g++", *options, str(source), "-o", str(library)), check=True)
    return ctypes.CDLL(str(library))


def _at_end(tensor: np.ndarray) -> np.ndarray:
    """Return a copy that is aligned as on a GPU."""
    memory = np.empty(tensor.nbytes + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    copied = memory[begin : begin + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
    copied[...] = tensor
    return copied


def _address(tensor: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.ctypes.data)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


if __name__ == "__main__":
    typer.run(main)
