"""Cases of low-bit matmuls on a CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.plugins.implementations import reference
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.int4_layout import GROUP_SIZES, padded_inner, scales_of_output
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS
from tests.host_kernels.library import (
    DTYPES,
    THREADS,
    address,
    allow,
    at_end,
    equal,
    require_near,
    weight_addresses,
)

GROUPS = {"int4": GROUP_SIZES, "int8": GROUP_SIZES, "float4": float4.GROUP_SIZES}
MATMULS = (*GROUPS, "k_quants")
_SIZES = ((8, 128), (56, 1120), (40, 32), (24, 192))  # outputs and inputs
_SIZES_K = ((8, 256), (56, 1280), (40, 512))
_ROWS = (1, 5, 8, 9, 16, 17, 33, 64)
_PITCH = 36  # floats of a row of partial sums


@dataclass(frozen=True)
class MatmulCase:
    """Operands of the matmul ``name`` for the most rows, in arrays that end where the memory does.

    ``group``: its attribute; None for a type K, which has none.
    """

    name: str
    dtype: str
    group: int | None
    tensors: Mapping[str, np.ndarray]

    @property
    def width(self) -> int:
        return len(self.tensors["weight"])

    @property
    def inner(self) -> int:
        return int(self.tensors["x"].shape[1])

    @property
    def suffix(self) -> str:
        kind = f"_{self.name}" if self.group is None else "_zeros" if "zeros" in self.tensors else ""
        kind = f"_by{self.group}" if self.name == "float4" else kind
        return f"{kind}_{self.dtype}"

    @property
    def shift(self) -> int:
        return 0 if self.group is None else GROUPS[self.name].index(self.group)

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        what = f"{self.name} {self.dtype}, groups of {self.group}, {self.width} x {self.inner}, {sorted(self.tensors)}"
        result = self._matmul(library, _ROWS[-1], 1)
        require_near(result, self._defined(self.tensors["x"]), what)
        for rows in _ROWS:
            assert equal(self._matmul(library, rows, 1), result[:rows]), f"{what}: {rows} rows have other bits"
        if self.inner <= 1024:  # of more, two blocks add in another order
            assert equal(self._matmul(library, 5, 2), result[:5]), f"{what}: a cluster has other bits"
        weight = self._defined(np.eye(self.inner)).T.astype(np.float32).astype(DTYPES[self.dtype])
        assert (self._weights(library) == weight).all(), f"{what}: dequantized weights differ"

    def _defined(self, x: np.ndarray) -> np.ndarray:
        exact = {n: a.astype(np.float64) if a.dtype == DTYPES[self.dtype] else a for n, a in self.tensors.items()}
        group = {} if self.group is None else {"group_size": self.group}
        result: np.ndarray = reference(f"{self.name}_matmul")(**exact | {"x": x.astype(np.float64)}, **group)
        return result

    def _matmul(self, library: Any, rows: int, blocks: int) -> np.ndarray:
        tile = next(each for each in (8, 16, 32, 64) if rows <= each)
        x, out = at_end(self.tensors["x"][:rows]), np.zeros((rows, self.width), DTYPES[self.dtype])
        self._allow(library, x)
        library.matmul(
            getattr(library, f"matmul_{tile}{self.suffix}"),
            address(x),
            *weight_addresses(self.tensors, "weight"),
            rows,
            self.width,
            self.inner,
            self.shift,
            address(out),
            -(-self.width // 32),
            blocks,
            4 * THREADS // 32 * tile * _PITCH,
        )
        return out

    def _weights(self, library: Any) -> np.ndarray:
        out, weight = np.zeros((self.width, self.inner), DTYPES[self.dtype]), self.tensors["weight"]
        self._allow(library)
        library.weights(
            getattr(library, f"weights{self.suffix}"),
            *weight_addresses(self.tensors, "weight"),
            self.width,
            self.inner,
            self.shift,
            address(out),
            -(-weight.nbytes // 16 // THREADS),
        )
        return out

    def _allow(self, library: Any, *more: np.ndarray) -> None:
        allow(library, (*self.tensors.values(), *more))


def k_quant_cases() -> Iterator[MatmulCase]:
    """Yield cases of the types K."""
    for seed, (dtype, kind) in enumerate(DTYPES.items()):
        rng = np.random.default_rng(seed)
        for name, quant in K_QUANTS.items():
            for width, inner in _SIZES_K:
                least = 0 if quant.minima else -64
                factors = rng.uniform(0.5, 1, (width, quant.factors_of_output(inner))) / inner**0.5 / 512
                tensors = {
                    "x": rng.normal(size=(_ROWS[-1], inner)).astype(kind),
                    "weight": rng.integers(0, 256, (width, inner * quant.bits // 8), dtype=np.uint8),
                    "scales": rng.integers(least, 64, (width, quant.scales_of_output(inner)), dtype=np.int8),
                    "factors": factors.astype(np.float16),
                }
                yield MatmulCase(name, dtype, None, {key: at_end(tensor) for key, tensor in tensors.items()})


def matmul_cases(name: str) -> Iterator[MatmulCase]:
    """Yield cases of all group sizes, with whole chunks of inputs and others."""
    if name not in GROUPS:
        yield from k_quant_cases()
        return
    for seed, (dtype, kind) in enumerate(DTYPES.items()):
        rng = np.random.default_rng(seed)
        for group in GROUPS[name]:
            for width, inner in _SIZES:
                count, stored = scales_of_output(inner, group), padded_inner(inner) // (1 if name == "int8" else 2)
                tensors = {"x": rng.normal(size=(_ROWS[-1], inner)).astype(kind)}
                tensors["weight"] = rng.integers(0, 256, (width, stored), dtype=np.uint8)
                if name == "float4":
                    tensors["scales"] = rng.integers(0, 127, (width, count), dtype=np.uint8)  # all that are finite
                    tensors["factors"] = (rng.uniform(0.5, 2, width) / 100 / inner**0.5).astype(np.float32)
                else:
                    tensors["scales"] = (rng.uniform(0.002, 0.006, (width, count)) / inner**0.5).astype(kind)
                tensors = {key: at_end(tensor) for key, tensor in tensors.items()}
                yield MatmulCase(name, dtype, group, tensors)
                if name == "int4":
                    zeros = at_end(rng.integers(0, 256, (width, count // 2), dtype=np.uint8))
                    yield MatmulCase(name, dtype, group, tensors | {"zeros": zeros})
