"""Rotary position embedding: the tables that attention reads."""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

Tables = tuple[ir.Value, ir.Value]  # cosine and sine


def layer_tables(b: GraphBuilder, spec: ModelSpec, positions: int, dtype: str) -> dict[Rope, Tables]:
    """The tables of every rule that some layer of the model rotates by."""
    used = dict.fromkeys(rope for layer in range(spec.layers) if (rope := spec.rope_of(layer)) is not None)
    return {rope: rotary_tables(b, rope, positions, dtype) for rope in used}


def rotary_tables(b: GraphBuilder, rope: Rope, positions: int, dtype: str) -> Tables:
    """Cosine and sine of every position below ``positions``, [positions, rotated // 2] in ``dtype``.

    Written as a computation on constants, which engines fold when they load: the graph file holds one row of
    frequencies instead of two tables. float32 up to the last step, as the models were trained.
    """
    return _tables(b, rope.frequencies, rope.magnitude, positions, dtype)


def whole_head_tables(b: GraphBuilder, rope: Rope | None, pairs: int, positions: int, dtype: str) -> Tables:
    """The same with ``pairs`` columns: pairs that the rule does not rotate, or all if there is none, stay in place."""
    frequencies, magnitude = ((), 1.0) if rope is None else (rope.frequencies, rope.magnitude)
    still = pairs - len(frequencies)
    magnitudes = magnitude if magnitude == 1.0 else [magnitude] * len(frequencies) + [1.0] * still
    return _tables(b, (*frequencies, *[0.0] * still), magnitudes, positions, dtype)


def head_order(rope: Rope | None, head_dim: int) -> list[int]:
    """The order of a head's values in which value i is paired with value i + head_dim // 2, as operators pair them.

    What is not rotated stands behind what is, in both halves.
    """
    rotated = 0 if rope is None else rope.rotated
    half, still = rotated // 2, list(range(rotated, head_dim))
    interleaved = rope is not None and rope.interleaved
    firsts = list(range(0, rotated, 2)) if interleaved else list(range(half))
    seconds = list(range(1, rotated, 2)) if interleaved else list(range(half, rotated))
    middle = len(still) // 2
    return firsts + still[:middle] + seconds + still[middle:]


def query_growth(b: GraphBuilder, rope: Rope, positions: int, dtype: str) -> ir.Value:
    """What queries of every position below ``positions`` are multiplied by, [positions, 1] in ``dtype``.

    A table, because a logarithm need not have the same last bit in a vector as alone.
    """
    turns = b.cast(b.op("Div", ramp_to(b, positions), b.constant(rope.growth_every)), "float32")
    grown = b.op("Log", b.op("Add", turns, b.constant(1, "float32")))
    table = b.op("Add", b.op("Mul", grown, b.constant(rope.growth, "float32")), b.constant(1, "float32"))
    return b.cast(b.op("Unsqueeze", table, b.constant([1])), dtype)


def ramp_to(b: GraphBuilder, stop: int) -> ir.Value:
    """int64[stop]: 0, 1, 2, …"""
    return b.op("Range", b.constant(0), b.constant(stop), b.constant(1))


def _tables(
    b: GraphBuilder, frequencies: Sequence[float], magnitude: float | Sequence[float], positions: int, dtype: str
) -> Tables:
    ramp = b.op("Unsqueeze", b.cast(ramp_to(b, positions), "float32"), b.constant([1]))
    angles = b.op("Mul", ramp, b.constant(frequencies, "float32"))
    tables = [b.op("Cos", angles), b.op("Sin", angles)]
    if magnitude != 1.0:
        tables = [b.op("Mul", table, b.constant(magnitude, "float32")) for table in tables]
    cosine, sine = (b.cast(table, dtype) for table in tables)
    return cosine, sine
