"""Rotary position embedding: tables of cosine and sine, their rows for the tokens of a call, and the order of a head.

Every lowering takes the positions of a call from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

Tables = tuple[ir.Value, ir.Value]  # cosine and sine


@dataclass(frozen=True)
class Rotary:
    """The rotation of queries and keys by the operator RotaryEmbedding, which the layers of a graph share.

    ``positions``: int64[batch, query], the position of each token in the cache. ``tables``: cosine and sine of each
    rotation rule, [positions, rotated // 2], or [batch, query, rotated // 2] if they are ``by_token``: the positions
    of a token in time, height and width are inputs then, and operators that rotate by cache positions get rotated
    queries and keys.
    """

    tables: Mapping[Rope, Tables]
    positions: ir.Value
    by_token: bool = False

    @classmethod
    def of_call(
        cls,
        b: GraphBuilder,
        spec: ModelSpec,
        graph_inputs: Mapping[str, ir.Value],
        positions: ir.Value,
        *,
        capacity: int,
        dtype: str,
    ) -> "Rotary":
        """Return the rotation of a decoder's call; ``positions`` are those in the cache, below ``capacity``."""
        tables = layer_tables(b, spec, capacity, dtype)
        if (rows := graph_inputs.get("positions")) is None:
            return cls(tables, positions)
        return cls({rope: _token_tables(b, of_rope, rope, rows) for rope, of_rope in tables.items()}, positions, True)

    def __call__(
        self, b: GraphBuilder, x: ir.Value, rope: Rope | None, head_dim: int, *, flat_heads: int | None = None
    ) -> ir.Value:
        """Return ``x`` [batch, heads, query, head_dim] rotated.

        With ``flat_heads`` it is [batch, query, flat_heads * head_dim].
        """
        if rope is None:
            return x
        attributes: dict[str, Any] = {} if flat_heads is None else {"num_heads": flat_heads}
        if rope.interleaved:
            attributes["interleaved"] = 1
        if rope.rotated != head_dim:
            attributes["rotary_embedding_dim"] = rope.rotated
        positions = () if self.by_token else (self.positions,)
        return b.op("RotaryEmbedding", x, *self.tables[rope], *positions, **attributes)


def call_positions(b: GraphBuilder, index: ir.Value, tokens: ir.Value) -> ir.Value:
    """Return the position of each token of a call over a linear cache, int64[batch, query].

    ``index``: int64[batch], the tokens of each row that the cache holds. ``tokens``: [batch, query, ...].
    """
    query = b.op("Shape", tokens, start=1, end=2)
    steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
    return b.op("Add", b.op("Unsqueeze", index, b.constant([1])), steps)


def layer_tables(b: GraphBuilder, spec: ModelSpec, positions: int, dtype: str) -> dict[Rope, Tables]:
    """Return the tables of every rotation rule of the model's layers."""
    used = dict.fromkeys(rope for layer in range(spec.layers) if (rope := spec.rope_of(layer)) is not None)
    return {rope: rotary_tables(b, rope, positions, dtype) for rope in used}


def rotary_tables(b: GraphBuilder, rope: Rope, positions: int, dtype: str) -> Tables:
    """Return cosine and sine of every position below ``positions``, [positions, rotated // 2] in ``dtype``.

    They are computed from constants, and engines fold them when they load: the graph file holds one row of frequencies
    instead of two tables. They are float32 until the last step, as the models were trained.
    """
    return _tables(b, rope.frequencies, rope.magnitude, positions, dtype)


def _token_tables(b: GraphBuilder, tables: Tables, rope: Rope, positions: ir.Value) -> Tables:
    """Return cosine and sine [..., rotated // 2] for each token of ``positions``, int64[3, ...]."""
    _, *fed = dims_of(positions)
    is_height, is_width = (b.constant([row == of_pair for of_pair in rope.rows], "bool") for row in (1, 2))

    def of_tokens(table: ir.Value) -> ir.Value:
        time, height, width = (
            b.op("Gather", table, b.op("Gather", positions, b.constant(row), axis=0)) for row in range(3)
        )
        chosen = b.op("Where", is_width, width, b.op("Where", is_height, height, time))
        chosen.shape = ir.Shape([*fed, rope.rotated // 2])  # values between subgraphs need named dimensions
        return chosen

    cosine, sine = (of_tokens(table) for table in tables)
    return cosine, sine


def whole_head_tables(
    b: GraphBuilder, rope: Rope | None, pairs: int, positions: int, dtype: str, first: int = 0
) -> Tables:
    """Return the tables of ``rotary_tables`` with ``pairs`` columns, from position ``first`` on.

    Pairs that the rule does not rotate get angle 0; so do all pairs if ``rope`` is None.
    """
    frequencies, magnitude = ((), 1.0) if rope is None else (rope.frequencies, rope.magnitude)
    unrotated = pairs - len(frequencies)
    magnitudes = magnitude if magnitude == 1.0 else [magnitude] * len(frequencies) + [1.0] * unrotated
    return _tables(b, (*frequencies, *[0.0] * unrotated), magnitudes, positions, dtype, first)


def head_order(rope: Rope | None, head_dim: int) -> list[int]:
    """Return the permutation of a head's values that pairs value i with value i + head_dim // 2, as the operators do.

    Values that are not rotated follow the rotated ones in both halves.
    """
    rotated = 0 if rope is None else rope.rotated
    half, unrotated = rotated // 2, list(range(rotated, head_dim))
    interleaved = rope is not None and rope.interleaved
    firsts = list(range(0, rotated, 2)) if interleaved else list(range(half))
    seconds = list(range(1, rotated, 2)) if interleaved else list(range(half, rotated))
    middle = len(unrotated) // 2
    return firsts + unrotated[:middle] + seconds + unrotated[middle:]


def query_scales(b: GraphBuilder, spec: ModelSpec, positions: int, dtype: str) -> ir.Value | None:
    """Return the factors of queries at every position below ``positions``, [positions, 1] in ``dtype``; None: all 1.

    They are those of the rotation rule (Ministral 3), or of layers without one (Llama 4), which count from 1.
    A table gives the same bits for any number of tokens; a vectorized logarithm may round differently than a scalar.
    """
    unrotated = spec.scales.query_beta != 0
    beta = spec.scales.query_beta or spec.rope.query_scale_beta
    if not beta:
        return None
    period = spec.scales.query_period if unrotated else spec.rope.query_scale_period
    counted = b.op("Add", arange(b, positions), b.constant(1)) if unrotated else arange(b, positions)
    turns = b.cast(b.op("Div", counted, b.constant(period)), "float32")
    grown = b.op("Log", b.op("Add", turns, b.constant(1, "float32")))
    table = b.op("Add", b.op("Mul", grown, b.constant(beta, "float32")), b.constant(1, "float32"))
    return b.cast(b.op("Unsqueeze", table, b.constant([1])), dtype)


def arange(b: GraphBuilder, stop: int, start: int = 0) -> ir.Value:
    """Return ``start``, ``start`` + 1, …, below ``stop``, int64."""
    return b.op("Range", b.constant(start), b.constant(stop), b.constant(1))


def _tables(
    b: GraphBuilder,
    frequencies: Sequence[float],
    magnitude: float | Sequence[float],
    positions: int,
    dtype: str,
    first: int = 0,
) -> Tables:
    ramp = b.op("Unsqueeze", b.cast(arange(b, first + positions, first), "float32"), b.constant([1]))
    angles = b.op("Mul", ramp, b.constant(frequencies, "float32"))
    tables = [b.op("Cos", angles), b.op("Sin", angles)]
    if magnitude != 1.0:
        tables = [b.op("Mul", table, b.constant(magnitude, "float32")) for table in tables]
    cosine, sine = (b.cast(table, dtype) for table in tables)
    return cosine, sine
