"""The layers of a decoder over a paged cache: attention and gated activation are operators of the project, everything
between them is a packed product, or a residual add and the norm behind it in one operator.

Values at the places where such a graph can be cut (export/passes/cut.py) have names that speak: hidden.i, qkv.i, …
Whatever runs between the cuts is captured into one CUDA graph, so nothing here may be computed on the host from a
shape.
"""

import math

import onnx_ir as ir

from tandemrt.engines.contract import BLOCK_SIZE, blocks_of
from tandemrt.export.model import layers as blocks
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.functions import swiglu, window_attention
from tandemrt.plugins.operators import DOMAIN

LIBRARY = "com.microsoft"  # onnxruntime's own operators, for CPU and CUDA


def functions(spec: ModelSpec) -> tuple[ir.Function, ...]:
    """The bodies behind the operators that ``stack`` uses."""
    return window_attention(qk_norm=spec.qk_norm), swiglu()


def stack(
    b: GraphBuilder, hidden: ir.Value, w: Weights, spec: ModelSpec, given: dict[str, ir.Value], *, capacity: int
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """All layers and the last norm: [batch, query, hidden] to [batch, rows, hidden], and the caches afterwards.

    ``given`` are the inputs of the contract, what is returned with the result are its outputs present_*.
    """
    with b.scope("place"):
        positions = blocks_of(capacity) * BLOCK_SIZE
        tables = blocks.rotary_tables(b, spec.rope, positions, w.dtype)
    with b.scope("layers.0/attention"):
        normed = blocks.rms_norm(b, hidden, w, "model.layers.0.input_layernorm", spec.norm_eps)
    presents: dict[str, ir.Value] = {}
    for layer in range(spec.layers):
        name, last = f"model.layers.{layer}", layer == spec.layers - 1
        with b.scope(f"layers.{layer}/attention"):
            hidden.name = f"hidden.{layer}"
            mixed, caches = _attention(b, normed, w, spec, layer, given, tables)
            presents |= caches
            if last:  # what nobody reads costs nothing from here on
                hidden, mixed = (_pick_rows(b, value, given["score_rows"]) for value in (hidden, mixed))
            out = blocks.linear(b, mixed, w, f"{name}.self_attn.o_proj", spec.hidden)
            bias = f"{name}.self_attn.o_proj.bias" if spec.out_bias else None
            normed, hidden = _add_norm(b, out, hidden, bias, w, f"{name}.post_attention_layernorm", spec)
        with b.scope(f"layers.{layer}/mlp"):
            hidden.name = f"residual.{layer}"
            out = _gated_mlp(b, normed, w, spec, layer)
            bias = f"{name}.mlp.down_proj.bias" if spec.mlp_bias else None
            following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
            normed, hidden = _add_norm(b, out, hidden, bias, w, following, spec)
    return normed, presents


def _attention(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    layer: int,
    given: dict[str, ir.Value],
    tables: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, dict[str, ir.Value]]:
    name = f"model.layers.{layer}.self_attn"
    widths = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    qkv = _packed(b, x, w, [f"{name}.{kind}_proj" for kind in "qkv"], widths, spec.qkv_bias)
    qkv.name = f"qkv.{layer}"
    past = [given[f"past_{kind}.{layer}"] for kind in ("key", "value")]
    norms = [w(f"{name}.{kind}_norm.weight", (spec.head_dim,)) for kind in "qk"] if spec.qk_norm else []
    cache = _dims(past[0])
    mixed, key, value = b.custom(
        "window_attention",
        *(qkv, *past, given["block_table"], given["write_index"], *tables, *norms),
        domain=DOMAIN,
        outputs=[(w.dtype, (*_dims(qkv)[:2], widths[0])), (w.dtype, cache), (w.dtype, cache)],
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        sliding_window=spec.window if spec.window is not None and spec.windowed[layer] else 0,
        scale=1 / math.sqrt(spec.head_dim),
        epsilon=spec.norm_eps,
    )
    mixed.name = f"mixed.{layer}"
    return mixed, {f"present_key.{layer}": key, f"present_value.{layer}": value}


def _gated_mlp(b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: int) -> ir.Value:
    name = f"model.layers.{layer}.mlp"
    names, widths = [f"{name}.{kind}_proj" for kind in ("gate", "up")], [spec.intermediate] * 2
    gate_up = _packed(b, x, w, names, widths, spec.mlp_bias)
    gate_up.name = f"gate_up.{layer}"
    outputs = [(w.dtype, (*_dims(gate_up)[:2], spec.intermediate))]
    (activated,) = b.custom("swiglu", gate_up, domain=DOMAIN, outputs=outputs)
    activated.name = f"activated.{layer}"
    return blocks.linear(b, activated, w, f"{name}.down_proj", spec.hidden)


def _packed(b: GraphBuilder, x: ir.Value, w: Weights, names: list[str], widths: list[int], bias: bool) -> ir.Value:
    """Several products of the same input as one, their results one behind the other."""
    weight = w.stacked([f"{name}.weight" for name in names], widths, (_width(x),))
    product = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
    return b.op("Add", product, w.stacked([f"{name}.bias" for name in names], widths)) if bias else product


def _add_norm(
    b: GraphBuilder, x: ir.Value, skip: ir.Value, bias: str | None, w: Weights, norm: str, spec: ModelSpec
) -> tuple[ir.Value, ir.Value]:
    """The RMS norm of x + skip (+ bias), and that sum."""
    shape = (w.dtype, _dims(x))
    vectors = [w(f"{norm}.weight", (spec.hidden,)), *([w(bias, (spec.hidden,))] if bias else [])]
    normed, total = b.custom(
        "SkipSimplifiedLayerNormalization",
        *(x, skip, *vectors),
        domain=LIBRARY,
        outputs=[shape, None, None, shape],
        epsilon=spec.norm_eps,
    )
    return normed, total


def _pick_rows(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x[i, rows[i, j]]: [batch, query, width] and int64[batch, rows] to [batch, rows, width].

    Not GatherND: onnxruntime's copies a temporary of the host to the device, which a replayed graph would read again.
    """
    index = b.op("Expand", b.op("Unsqueeze", rows, b.constant([2])), b.constant([1, 1, _width(x)]))
    return b.op("GatherElements", x, index, axis=1)


def _dims(value: ir.Value) -> tuple[int | str, ...]:
    assert value.shape is not None
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape.dims)


def _width(value: ir.Value) -> int:
    return int(_dims(value)[-1])
