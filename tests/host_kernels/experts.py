"""Cases of the matmuls of experts on a CPU."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.experts import kept_bytes
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.constants import ACTIVATIONS, SILU_EXPERTS
from tandemrt.plugins.operators.int4_layout import CHUNK, GROUP_SIZES, padded_inner, scales_of_output
from tandemrt.plugins.reference.low_bit_experts import VALUES
from tests.host_kernels.library import (
    DTYPES,
    THREADS,
    address,
    allow,
    at_end,
    equal,
    items,
    numbers_of,
    require_near,
    weight_addresses,
)

EXPERTS = {
    "experts_int4": GROUP_SIZES,
    "experts_int8": GROUP_SIZES,
    "experts_float4": float4.GROUP_SIZES,
    "experts_float8": (CHUNK,),
}
_SIZES = ((160, 96), (2336, 32), (32, 2112))  # hidden size and width; some have more chunks than warps share
_COUNT, _CHOICES = 3, 2
_PAIRS = (33, 0, 9)  # of each expert; an item has at most 32
_RING = 4 * 4 * THREADS * 16
_CLAMPED = {"interleaved": 1, "alpha": 1.702, "cubic": 0.0, "limit": 0.8, "offset": 1.0}
_BLOCKS = (3, 2)  # the number of blocks changes no bit
_KEPT = ((8, 4, 3), (16, 8, 4))  # nor do rows that are kept: of an item, warps, stages


@dataclass(frozen=True)
class ExpertsCase:
    """Operands of both matmuls for all pairs, in arrays that end where the memory does."""

    name: str
    dtype: str
    group: int
    width: int
    tensors: Mapping[str, np.ndarray]
    activation: Mapping[str, float] = field(default_factory=lambda: SILU_EXPERTS)

    @property
    def kind(self) -> str:
        zeros, group = "gate_up_zeros" in self.tensors, f"by{self.group}_" if self.name == "experts_float4" else ""
        return f"{'zeros_' if zeros else group}{self.dtype}"

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        t, hidden = self.tensors, self.tensors["x"].shape[1]
        what = f"{self.name} {self.dtype}, groups of {self.group}, {hidden} x {self.width}, {sorted(t)}"
        together, alone = items(_PAIRS, 32), items(_PAIRS, 1)
        activated = self._gate_up(library, together, _BLOCKS[0])
        assert equal(self._gate_up(library, alone, _BLOCKS[1]), activated), f"{what}: activations alone differ"
        both = self._values("gate_up").reshape(_COUNT, 2 * self.width, -1)[:, :, :hidden]
        rows, experts = t["x"].astype(np.float64)[t["order"] // _CHOICES], np.repeat(np.arange(_COUNT), _PAIRS)
        products = np.einsum("eoi,pi->peo", both, rows)[np.arange(len(rows)), experts]
        require_near(activated, self._activated(products + self._bias("gate_up", 2 * self.width)[experts]), what)
        parts = self._down(library, activated, together, _BLOCKS[0])
        assert equal(self._down(library, activated, alone, _BLOCKS[1]), parts), f"{what}: results alone differ"
        for kept in _KEPT if self.name in ("experts_float4", "experts_float8") else ():
            placed = items(_PAIRS, kept[0])
            padded = at_end(np.concatenate([placed, np.zeros((32, 4), np.int32)]))
            others = self._gate_up(library, padded, 3, kept, len(placed))
            assert equal(others, activated), f"{what}: activations of kept rows differ, {kept}"
            others = self._down(library, activated, padded, 3, kept, len(placed))
            assert equal(others, parts), f"{what}: results of kept rows differ, {kept}"
        down = self._values("down").reshape(_COUNT, hidden, -1)[:, :, : self.width]
        exact = np.einsum("eoi,pi->peo", down, activated.astype(np.float64))[np.arange(len(rows)), experts]
        exact += self._bias("down", hidden)[experts]
        require_near(parts[t["order"]], exact * t["shares"][t["order"], None], what)
        values = self._values("down")[:, : self.width].astype(np.float32).astype(DTYPES[self.dtype])
        assert (self._dequantized(library) == values).all(), f"{what}: dequantized weights differ"

    def _bias(self, name: str, outputs: int) -> np.ndarray:
        """Return the biases of each expert, zeros if there are none."""
        bias = self.tensors.get(f"{name}_bias")
        return np.zeros((_COUNT, outputs)) if bias is None else bias.astype(np.float64).reshape(_COUNT, -1)

    def _activated(self, both: np.ndarray) -> np.ndarray:
        """Return the activation by its definition: of experts whose weights are the identity."""
        how = {name: value for name, value in self.activation.items() if name != "interleaved"}
        by_turns = both.reshape(len(both), -1, 2) if self.activation["interleaved"] else both.reshape(len(both), 2, -1)
        gate, up = (by_turns.swapaxes(1, 2) if self.activation["interleaved"] else by_turns).swapaxes(0, 1)
        if limit := how["limit"]:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        raised = gate * (how["alpha"] + how["cubic"] * gate**2)
        result: np.ndarray = (up + how["offset"]) * gate / (1 + np.exp(-raised))
        return result

    def _gate_up(
        self, library: Any, items: np.ndarray, blocks: int, kept: tuple[int, int, int] | None = None, length: int = 0
    ) -> Any:
        t, pairs, numbers = self.tensors, len(self.tensors["order"]), ("alpha", "cubic", "limit", "offset")
        hidden = t["x"].shape[1]
        out, count = (
            np.zeros((pairs, self.width), DTYPES[self.dtype]),
            at_end(np.array([length or len(items)], np.int32)),
        )
        weight, routed = self._weight("gate_up"), (t["order"], items, count)
        bias = t.get("gate_up_bias")
        activation = (bias, int(self.activation["interleaved"]))
        allow(library, (*t.values(), items, count))
        arguments = (t["x"], *weight, *routed, hidden, self.width, _CHOICES, *activation, out)
        self._call(library, "gate_up", arguments, blocks, hidden, kept, [self.activation[name] for name in numbers])
        return out

    def _down(
        self,
        library: Any,
        activated: np.ndarray,
        items: np.ndarray,
        blocks: int,
        kept: tuple[int, int, int] | None = None,
        length: int = 0,
    ) -> Any:
        t, hidden = self.tensors, self.tensors["x"].shape[1]
        x, count = at_end(activated), at_end(np.array([length or len(items)], np.int32))
        out = np.zeros((len(x), hidden), np.float32)
        weight, routed = self._weight("down"), (t["order"], items, count, t["shares"])
        allow(library, (*t.values(), items, count, x))
        arguments = (x, *weight, *routed, hidden, self.width, t.get("down_bias"), out)
        self._call(library, "down", arguments, blocks, self.width, kept)
        return out

    def _call(
        self,
        library: Any,
        name: str,
        arguments: Sequence[Any],
        blocks: int,
        inner: int,
        kept: tuple[int, int, int] | None,
        floats: Sequence[float] = (),
    ) -> None:
        """Run a kernel that streams its rows, or keeps them: the rows of an item, warps and stages."""
        how, threads, shared = f"{name}_{self.kind}", THREADS, _RING
        if kept is not None:
            rows, warps, stages = kept
            how, threads = f"{name}_kept_{self.kind}", 32 * warps
            arguments, shared = (*arguments, rows, stages), kept_bytes(rows, inner, stages, warps)
        kernel = ctypes.cast(getattr(library, how), ctypes.c_void_p)
        library.call(kernel, numbers_of(arguments), (ctypes.c_float * 4)(*floats), blocks, 1, 1, threads, shared)

    def _dequantized(self, library: Any) -> np.ndarray:
        t = self.tensors
        out = np.zeros((len(t["down"]), self.width), DTYPES[self.dtype])
        allow(library, t.values())
        *pointers, shift = self._weight("down")
        library.weights(
            getattr(library, f"weights_{self.kind}"),
            *pointers,
            len(out),
            self.width,
            shift,
            address(out),
            -(-t["down"].nbytes // 16 // THREADS),
        )
        return out

    def _weight(self, name: str) -> tuple[Any, ...]:
        pointers = weight_addresses(self.tensors, name, f"{name}_")
        return *pointers, EXPERTS[self.name].index(self.group)

    def _values(self, name: str) -> np.ndarray:
        numbers, t = self.name.removeprefix("experts_"), self.tensors
        more = [t[end] for end in (f"{name}_zeros", f"{name}_factors") if end in t]
        values: np.ndarray = VALUES[numbers](t[name], t[f"{name}_scales"], *more, group_size=self.group)
        return values


def expert_cases(name: str) -> Iterator[ExpertsCase]:
    """Yield cases of all group sizes, with whole chunks of inputs and others."""
    for seed, dtype in enumerate(DTYPES):
        rng = np.random.default_rng(seed)
        for group in EXPERTS[name]:
            for hidden, width in _SIZES:
                pairs = sum(_PAIRS)
                tensors = {"x": rng.normal(size=(pairs // _CHOICES, hidden)).astype(DTYPES[dtype])}
                tensors["order"] = rng.permutation(pairs).astype(np.int32)
                tensors["shares"] = rng.uniform(0.1, 1, pairs).astype(np.float32)
                for key, outputs, inner in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
                    tensors |= _stored(rng, name, key, _COUNT * outputs, inner, group, DTYPES[dtype])
                placed = {key: at_end(each) for key, each in tensors.items()}
                yield ExpertsCase(name, dtype, group, width, placed)
                biases = {
                    f"{key}_bias": at_end(rng.normal(size=_COUNT * outputs).astype(DTYPES[dtype]))
                    for key, outputs in (("gate_up", 2 * width), ("down", hidden))
                }
                yield ExpertsCase(name, dtype, group, width, placed | biases, _CLAMPED)
                yield ExpertsCase(name, dtype, group, width, placed, {**SILU_EXPERTS, **ACTIVATIONS["gelu_tanh"]})
                if name == "experts_int4":
                    for key in ("gate_up", "down"):
                        outputs, groups = tensors[f"{key}_scales"].shape
                        tensors[f"{key}_zeros"] = rng.integers(0, 256, (outputs, groups // 2), dtype=np.uint8)
                    yield ExpertsCase(name, dtype, group, width, {key: at_end(each) for key, each in tensors.items()})


def _stored(
    rng: np.random.Generator, name: str, key: str, outputs: int, inner: int, group: int, dtype: np.dtype
) -> dict[str, np.ndarray]:
    padded, size = padded_inner(inner), 1 / inner**0.5
    weight = rng.integers(0, 256, (outputs, padded * (2 if name.endswith("8") else 1) // 2), dtype=np.uint8)
    shape = (outputs, scales_of_output(inner, group))
    if name == "experts_float8":
        numbers = np.where(weight & 0x7F == 0x7F, 0, weight).astype(np.uint8)  # not a number
        scales = (rng.uniform(0.5, 1.5, (outputs, padded // CHUNK)) * size / 50).astype(np.float32)
        return {key: numbers, f"{key}_scales": scales}
    if name == "experts_float4":
        factors = (rng.uniform(0.5, 1.5, outputs) * size / 600).astype(np.float32)
        scales = rng.integers(0, 127, shape, dtype=np.uint8)  # all that are finite
        return {key: weight, f"{key}_scales": scales, f"{key}_factors": factors}
    most = 5 if name == "experts_int4" else 75
    return {key: weight, f"{key}_scales": (rng.uniform(0.5, 1.5, shape) * size / most).astype(dtype)}
