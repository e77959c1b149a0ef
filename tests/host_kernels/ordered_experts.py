"""Cases of the matmuls of experts in 16 bits on a CPU: any blocks, depths and rows of an item give the same bits."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.experts_ordered import WIDE, shared_bytes
from tests.host_kernels.library import DTYPES, allow, at_end, equal, items, numbers_of, require_near

ORDERED = "experts"
_CHOICES = 2
_SIZES = ((528, 264), (64, 40))  # hidden size and width: some are no whole chunks
_PAIRS = (7, 0, 41, 3, 1, 1)  # of each expert
_LAUNCHES = ((32, 1), (32, 7), (16, 3), (8, 40))  # rows of an item, blocks


@dataclass(frozen=True)
class OrderedCase:
    """Operands of both matmuls for all pairs, in arrays that end where the memory does."""

    dtype: str
    hidden: int
    width: int
    tensors: Mapping[str, np.ndarray]

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        what, t = f"{self.dtype}, {self.hidden} x {self.width}", self.tensors
        activated, outputs = self._both(library, _LAUNCHES[0], WIDE[0])
        for launch, depth in zip(cycle(_LAUNCHES[1:]), WIDE[1:], strict=False):
            others = self._both(library, launch, depth)
            assert equal(others[0], activated), f"{what}: activations differ with {launch}, {depth}"
            assert equal(others[1], outputs), f"{what}: results differ with {launch}, {depth}"
        experts = np.repeat(np.arange(len(_PAIRS)), _PAIRS)
        both, down = (t[name].astype(np.float64) for name in ("gate_up", "down"))
        both, down = (each.reshape(len(_PAIRS), -1, each.shape[1])[experts] for each in (both, down))
        products = np.einsum("poi,pi->po", both, t["x"].astype(np.float64)[t["order"] // _CHOICES])
        products = products.astype(DTYPES[self.dtype]).astype(np.float64)
        products += t["gate_up_bias"].astype(np.float64).reshape(len(_PAIRS), -1)[experts]
        gates, ups = np.split(products, 2, axis=1)
        require_near(activated, gates * ups / (1 + np.exp(-gates)), what, 2.0**-6)
        require_near(outputs, np.einsum("poi,pi->po", down, activated.astype(np.float64)), what)

    def _both(self, library: Any, launch: tuple[int, int], depth: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return activations and outputs, by place."""
        t, (most, blocks), (warps, stages) = self.tensors, launch, depth
        placed, dtype, pairs = items(_PAIRS, most), DTYPES[self.dtype], sum(_PAIRS)
        readable = at_end(np.concatenate([placed, np.full((32, 4), -1, np.int32)]))
        how = (readable, at_end(np.array([len(placed)], np.int32)), most, stages, self.hidden, self.width)
        activated, outputs = at_end(np.zeros((pairs, self.width), dtype)), np.zeros((pairs, self.hidden), dtype)
        allow(library, (*t.values(), *how[:2], activated))
        gates = (t["order"], _CHOICES, t["gate_up_bias"], 0, activated)
        for name, arguments, inner in (
            ("gate_up_ordered", (t["x"], t["gate_up"], *how, *gates), self.hidden),
            ("down_ordered", (activated, t["down"], *how, outputs), self.width),
        ):
            kernel = ctypes.cast(getattr(library, f"{name}_{self.dtype}"), ctypes.c_void_p)
            shared = shared_bytes(most, inner, warps, stages)
            library.call(kernel, numbers_of(arguments), (ctypes.c_float * 4)(1), blocks, 1, 1, 32 * warps, shared)
        return activated, outputs


def ordered_cases() -> Iterator[OrderedCase]:
    """Yield cases of both dtypes."""
    rng, pairs, experts = np.random.default_rng(0), sum(_PAIRS), len(_PAIRS)
    for dtype, kind in DTYPES.items():
        for hidden, width in _SIZES:
            drawn = {
                "x": rng.normal(size=(-(-pairs // _CHOICES), hidden)),
                "gate_up": rng.normal(size=(2 * experts * width, hidden)) / hidden**0.5,
                "down": rng.normal(size=(experts * hidden, width)) / width**0.5,
                "gate_up_bias": rng.normal(size=2 * experts * width),
            }
            order = at_end(rng.permutation(pairs).astype(np.int32))
            tensors = {name: at_end(each.astype(kind)) for name, each in drawn.items()}
            yield OrderedCase(dtype, hidden, width, tensors | {"order": order})
