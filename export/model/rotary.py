"""Rotary position embedding: the tables that attention reads."""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.read.rope import Rope


def rotary_tables(b: GraphBuilder, rope: Rope, positions: int, dtype: str) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine of every position below ``positions``, [positions, head_dim // 2] in ``dtype``.

    Written as a computation on constants, which engines fold when they load: the graph file holds one row of
    frequencies instead of two tables. float32 up to the last step, as the models were trained.
    """
    ramp = b.op("Unsqueeze", b.cast(ramp_to(b, positions), "float32"), b.constant([1]))
    angles = b.op("Mul", ramp, b.constant(rope.frequencies, "float32"))
    tables = [b.op("Cos", angles), b.op("Sin", angles)]
    if rope.magnitude != 1.0:
        tables = [b.op("Mul", table, b.constant(rope.magnitude, "float32")) for table in tables]
    cosine, sine = (b.cast(table, dtype) for table in tables)
    return cosine, sine


def ramp_to(b: GraphBuilder, stop: int) -> ir.Value:
    """int64[stop]: 0, 1, 2, …"""
    return b.op("Range", b.constant(0), b.constant(stop), b.constant(1))
