"""The blocks of a decoder: functions on a builder that compose; each takes values and returns a value.

Shapes use the symbols of engines/contract.py; ``hidden`` is [batch, query, hidden size].
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

Lowering = Literal["length", "mask", "paged"]


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, [batch, kv_heads, capacity, head_dim]."""

    key: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class Place:
    """Where the new tokens stand: what attention and rotary embedding need, made once and shared by all layers.

    ``index``: int64[batch], tokens already cached. ``positions``: int64[batch, query]. ``cosine``, ``sine``:
    [capacity, head_dim // 2]. One of ``length`` (int64[batch], cached plus new tokens) and ``mask``
    (bool[batch, 1, query, capacity]) says which cache entries a token sees.
    """

    index: ir.Value
    positions: ir.Value
    cosine: ir.Value
    sine: ir.Value
    length: ir.Value | None
    mask: ir.Value | None


def place(
    b: GraphBuilder, tokens: ir.Value, index: ir.Value, rope: Rope, *, capacity: int, dtype: str, lowering: Lowering
) -> Place:
    """Derive positions, rotary tables and visibility from ``tokens`` [batch, query] and ``index`` [batch]."""
    query = b.op("Shape", tokens, start=1, end=2)
    steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
    positions = b.op("Add", b.op("Unsqueeze", index, b.constant([1])), steps)
    length = mask = None
    if lowering == "length":
        # Attention aligns causality to the end of each row's length, so padded query rows count as well.
        # Taken from the positions rather than from the shape: what depends on a shape is computed on the host, and
        # `index` would have to travel there.
        length = b.op("Add", b.op("ReduceMax", positions, b.constant([1]), keepdims=0), b.constant(1))
    else:
        seen = b.op("LessOrEqual", _ramp(b, capacity), b.op("Unsqueeze", positions, b.constant([2])))
        mask = b.op("Unsqueeze", seen, b.constant([1]))
    return Place(index, positions, *rotary_tables(b, rope, capacity, dtype), length, mask)


def rotary_tables(b: GraphBuilder, rope: Rope, capacity: int, dtype: str) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine of every position, [capacity, head_dim // 2].

    Written as a computation on constants, which engines fold when they load: the graph file holds one row of
    frequencies instead of two tables. float32 up to the last step, as the models were trained.
    """
    ramp = b.op("Unsqueeze", b.cast(_ramp(b, capacity), "float32"), b.constant([1]))
    angles = b.op("Mul", ramp, b.constant(rope.frequencies, "float32"))
    tables = [b.op("Cos", angles), b.op("Sin", angles)]
    if rope.magnitude != 1.0:
        tables = [b.op("Mul", table, b.constant(rope.magnitude, "float32")) for table in tables]
    cosine, sine = (b.cast(table, dtype) for table in tables)
    return cosine, sine


def linear(b: GraphBuilder, x: ir.Value, w: Weights, name: str, into: int, *, bias: bool = False) -> ir.Value:
    """x @ weight.T (+ bias); the last dimension of ``x`` becomes ``into``."""
    assert x.shape is not None
    weight = w(f"{name}.weight", (into, int(x.shape[-1])))
    product = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
    return b.op("Add", product, w(f"{name}.bias", (into,))) if bias else product


def rms_norm(b: GraphBuilder, x: ir.Value, w: Weights, name: str, eps: float) -> ir.Value:
    """Root-mean-square norm over the last dimension, computed in float32."""
    assert x.shape is not None
    return b.op("RMSNormalization", x, w(f"{name}.weight", (int(x.shape[-1]),)), axis=-1, epsilon=eps, stash_type=1)


def attention(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, spec: ModelSpec, at: Place, past: Cache
) -> tuple[ir.Value, Cache]:
    """Grouped-query attention over the cache, the new tokens included. Returns the block's output and the new cache."""

    def heads(kind: str, count: int) -> ir.Value:  # [batch, count, query, head_dim]
        flat = linear(b, x, w, f"{name}.{kind}_proj", count * spec.head_dim, bias=spec.qkv_bias)
        split = b.op("Reshape", flat, b.constant([0, 0, count, spec.head_dim]))
        if spec.qk_norm and kind != "v":
            split = rms_norm(b, split, w, f"{name}.{kind}_norm", spec.norm_eps)
        turned = b.op("Transpose", split, perm=[0, 2, 1, 3])
        return turned if kind == "v" else b.op("RotaryEmbedding", turned, at.cosine, at.sine, at.positions)

    query, key, value = heads("q", spec.heads), heads("k", spec.kv_heads), heads("v", spec.kv_heads)
    present = Cache(
        *(
            b.op("TensorScatter", old, new, at.index, axis=2, mode="linear")
            for old, new in ((past.key, key), (past.value, value))
        )
    )
    scale = 1 / math.sqrt(spec.head_dim)
    if at.mask is None:
        mixed = b.op(
            "Attention", query, present.key, present.value, None, None, None, at.length, is_causal=1, scale=scale
        )
    else:
        # The scale goes into the query: left to the operator it would be spread over both factors, cache included.
        query = b.op("Mul", query, b.constant(scale, w.dtype))
        mixed = b.op("Attention", query, present.key, present.value, at.mask, is_causal=0, scale=1.0)
    joined = b.op(
        "Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.constant([0, 0, spec.heads * spec.head_dim])
    )
    return linear(b, joined, w, f"{name}.o_proj", spec.hidden, bias=spec.out_bias), present


def gated_mlp(b: GraphBuilder, x: ir.Value, w: Weights, name: str, spec: ModelSpec) -> ir.Value:
    """down(silu(gate(x)) * up(x))."""
    gate, up = (
        linear(b, x, w, f"{name}.{kind}_proj", spec.intermediate, bias=spec.mlp_bias) for kind in ("gate", "up")
    )
    silu = b.op("Mul", gate, b.op("Sigmoid", gate))
    return linear(b, b.op("Mul", silu, up), w, f"{name}.down_proj", spec.hidden, bias=spec.mlp_bias)


def pick_rows(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x[i, rows[i, j]]: [batch, query, hidden] and int64[batch, rows] to [batch, rows, hidden]."""
    return b.op("GatherND", x, b.op("Unsqueeze", rows, b.constant([2])), batch_dims=1)


def _ramp(b: GraphBuilder, stop: int) -> ir.Value:
    """int64[stop]: 0, 1, 2, …"""
    return b.op("Range", b.constant(0), b.constant(np.int64(stop)), b.constant(1))
