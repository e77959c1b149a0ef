"""Write a graph of the *mask* lowering in operators of opset 17 that every release of TensorRT has a layer for.

TensorRT has layers for attention, cache update, rotary embedding and RMS norm from release 10.15 on. Sums that need it
are computed in float32: norms, softmax, softcap and GELU.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.passes.graph_pass import graph_pass, nodes_in_order, values_typed

OPSET, IR_VERSION = 17, 8  # what the parser of TensorRT 8.6 reads
NEVER = -1e30  # score of an entry that a token must not attend to

# How to write one node in basic operators. The builder appends the new nodes; the result replaces the node's output.
Expansion = Callable[[GraphBuilder, ir.Node], ir.Value]


def no_constant_nodes(model: ir.Model) -> str | None:
    """No node computes a value from constants alone."""
    return next((f"{node.name} is left" for node in model.graph if _is_constant(node)), None)


def only_basic_operators(model: ir.Model) -> str | None:
    """No operator is left that opset 17 does not have."""
    return next((f"{node.name} is left" for node in model.graph if _expansion(node)), None)


@graph_pass(ensures=(nodes_in_order, no_constant_nodes))
def fold_constants(model: ir.Model) -> int:
    """Replace values that are computed from constants, such as rotary tables, by initializers.

    TensorRT would compute them on a GPU, with other last bits than a CPU.
    """
    count = 0
    for node in list(model.graph):
        if not _is_constant(node):
            continue
        feeds = {v.name: v.const_value.numpy() for v in node.inputs if v is not None and v.const_value is not None}
        for value, array in zip(node.outputs, _computed(node, feeds, model.opset_imports[""]), strict=True):
            tensor = ir.tensor(np.asarray(array), dtype=value.dtype, name=f"{value.name}.folded")
            folded = ir.Value(name=tensor.name, const_value=tensor, shape=tensor.shape, type=value.type)
            model.graph.register_initializer(folded)
            ir.convenience.replace_all_uses_with(value, folded)
        model.graph.remove(node, safe=True)
        count += 1
    RemoveUnusedNodesPass()(model)
    return count


@graph_pass(requires=(nodes_in_order, values_typed), ensures=(nodes_in_order, values_typed, only_basic_operators))
def expand_operators(model: ir.Model) -> int:
    """Replace every operator of ``EXPANSIONS`` by basic operators, and declare opset 17."""
    b = GraphBuilder("basic", OPSET)
    count = 0
    for node in list(model.graph):
        expand = _expansion(node)
        if expand is None:
            continue
        first = len(b.nodes)
        with b.scope(str(node.name)):
            result = expand(b, node)
        [replaced] = node.outputs
        result.name, result.shape = replaced.name, replaced.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], b.nodes[first:], [replaced], [result])
        count += 1
    for value in b.initializers.values():
        value.name = f"basic.{value.name}"
        model.graph.register_initializer(value)
    model.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    return count


def _attention(b: GraphBuilder, node: ir.Node) -> ir.Value:
    """Attention with a boolean mask [batch, 1, query, entries], or of all tokens to all of them without one."""
    query, key, value, *mask = (_input(node, at) for at in range(len(node.inputs)))
    scores = b.cast(_matmul_by_group(b, query, b.op("Transpose", key, perm=[0, 1, 3, 2])), "float32")
    if cap := node.attributes.get_float("softcap", 0.0):
        limit = b.constant(cap, "float32")
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, limit)), limit)
    if mask:
        scores = b.op("Where", *mask, scores, b.constant(NEVER, "float32"))
    weights = b.op("Cast", b.op("Softmax", scores, axis=-1), to=int(_dtype(query)))
    return _matmul_by_group(b, weights, value)


def _matmul_by_group(b: GraphBuilder, rows: ir.Value, matrix: ir.Value) -> ir.Value:
    """Return ``rows`` [batch, heads, query, n] times ``matrix`` [batch, kv_heads, n, m]: [batch, heads, query, m].

    Heads that share keys are rows of one matmul.
    """
    (_, heads, _, depth), (_, groups, _, width) = dims_of(rows), dims_of(matrix)
    if heads == groups:
        return b.op("MatMul", rows, matrix)
    product = b.op("MatMul", b.op("Reshape", rows, b.constant([0, groups, -1, depth])), matrix)
    return b.op("Reshape", product, b.constant([0, heads, -1, width]))


def _cache_update(b: GraphBuilder, node: ir.Node) -> ir.Value:
    """Write the rows of new tokens. Writing them twice gives the same, so the cache may be updated in place."""
    cache, update, index = (_input(node, at) for at in range(3))

    def rows() -> ir.Value:
        count = b.op("Squeeze", _sizes(b, update, 2, 3), b.constant([0]))
        steps = b.op("Range", b.constant(0), count, b.constant(1))
        return b.op("Unsqueeze", b.op("Add", b.op("Unsqueeze", index, b.constant([1])), steps), b.constant([1, 3]))

    places = b.op("Expand", b.once(("rows", index.name), rows), b.op("Shape", update))
    places.shape = update.shape
    return b.op("ScatterElements", cache, places, update, axis=2)


def _rotary_embedding(b: GraphBuilder, node: ir.Node) -> ir.Value:
    """Rotate pairs of values of ``x`` [batch, heads, query, head_dim] by the tables' angles at the positions.

    ``x`` may be [batch, query, heads * head_dim].
    """
    x, cosine, sine = (_input(node, at) for at in range(3))
    if heads := node.attributes.get_int("num_heads", 0):
        dim = width_of(x) // heads
        split = b.op("Transpose", b.op("Reshape", x, b.constant([0, 0, heads, dim])), perm=[0, 2, 1, 3])
        turned = _rotated(b, node, split, cosine, sine)
        return b.op("Reshape", b.op("Transpose", turned, perm=[0, 2, 1, 3]), b.constant([0, 0, heads * dim]))
    return _rotated(b, node, x, cosine, sine)


def _rotated(b: GraphBuilder, node: ir.Node, x: ir.Value, cosine: ir.Value, sine: ir.Value) -> ir.Value:
    positions = node.inputs[3] if len(node.inputs) > 3 else None
    width = width_of(x)
    rotated = node.attributes.get_int("rotary_embedding_dim", 0) or width
    cosine, sine = (_angles(b, table, positions) for table in (cosine, sine))
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    one, two = _pairs(b, x, rotated, interleaved=interleaved)
    first = b.op("Sub", b.op("Mul", one, cosine), b.op("Mul", two, sine))
    second = b.op("Add", b.op("Mul", two, cosine), b.op("Mul", one, sine))
    rest = [] if rotated == width else [_columns(b, x, rotated, width)]
    if not interleaved:
        return b.op("Concat", first, second, *rest, axis=-1)
    pairs = [b.op("Unsqueeze", part, b.constant([4])) for part in (first, second)]
    joined = b.op("Reshape", b.op("Concat", *pairs, axis=4), b.constant([0, dims_of(x)[1], -1, rotated]))
    return b.op("Concat", joined, *rest, axis=-1) if rest else joined


def _angles(b: GraphBuilder, table: ir.Value, positions: ir.Value | None) -> ir.Value:
    """Return the angles of each token: the ``table`` at ``positions``, or the table of tokens itself without them."""

    def angles() -> ir.Value:
        of_tokens = table if positions is None else b.op("Gather", table, positions)
        return b.op("Unsqueeze", of_tokens, b.constant([1]))

    return b.once((table.name, positions and positions.name), angles)


def _pairs(b: GraphBuilder, x: ir.Value, rotated: int, *, interleaved: bool) -> tuple[ir.Value, ir.Value]:
    if not interleaved:
        return _columns(b, x, 0, rotated // 2), _columns(b, x, rotated // 2, rotated)
    split = b.op("Reshape", _columns(b, x, 0, rotated), b.constant([0, dims_of(x)[1], -1, rotated // 2, 2]))
    one, two = (b.op("Gather", split, b.constant(at), axis=4) for at in range(2))
    return one, two


def _columns(b: GraphBuilder, x: ir.Value, start: int, end: int) -> ir.Value:
    if (start, end) == (0, width_of(x)):
        return x
    return b.op("Slice", x, b.constant([start]), b.constant([end]), b.constant([x.shape.rank() - 1]))


def _rms_norm(b: GraphBuilder, node: ir.Node) -> ir.Value:
    x, weight = _input(node, 0), _input(node, 1)
    wide = b.cast(x, "float32")
    return b.op("Mul", b.op("Cast", _normalized(b, wide, node), to=int(_dtype(x))), weight)


def _layer_norm(b: GraphBuilder, node: ir.Node) -> ir.Value:
    x, weight = _input(node, 0), _input(node, 1)
    wide = b.cast(x, "float32")
    centred = b.op("Sub", wide, b.op("ReduceMean", wide, axes=[-1], keepdims=1))
    scaled = b.op("Mul", b.op("Cast", _normalized(b, centred, node), to=int(_dtype(x))), weight)
    return b.op("Add", scaled, _input(node, 2)) if len(node.inputs) > 2 else scaled


def _normalized(b: GraphBuilder, x: ir.Value, node: ir.Node) -> ir.Value:
    """``x`` / sqrt(mean(x²) + epsilon)."""
    mean = b.op("ReduceMean", b.op("Mul", x, x), axes=[-1], keepdims=1)
    epsilon = b.constant(node.attributes.get_float("epsilon", 1e-5), "float32")
    return b.op("Div", x, b.op("Sqrt", b.op("Add", mean, epsilon)))


def _gelu(b: GraphBuilder, node: ir.Node) -> ir.Value:
    """x/2 (1 + erf(x/√2)), or by approximation x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    x = _input(node, 0)
    wide = b.cast(x, "float32")

    def times(value: ir.Value, factor: float) -> ir.Value:
        return b.op("Mul", value, b.constant(factor, "float32"))

    if node.attributes.get_string("approximate", "none") == "tanh":
        cubic = times(b.op("Mul", wide, b.op("Mul", wide, wide)), 0.044715)
        bent = b.op("Tanh", times(b.op("Add", wide, cubic), math.sqrt(2 / math.pi)))
    else:
        bent = b.op("Erf", times(wide, math.sqrt(0.5)))
    half = times(b.op("Mul", wide, b.op("Add", bent, b.constant(1, "float32"))), 0.5)
    return b.op("Cast", half, to=int(_dtype(x)))


def _shape(b: GraphBuilder, node: ir.Node) -> ir.Value:
    """The parser of TensorRT 8.6 ignores the attributes of Shape."""
    x = _input(node, 0)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims_of(x)))
    return _sizes(b, x, start, end)


def _sizes(b: GraphBuilder, x: ir.Value, start: int, end: int) -> ir.Value:
    return b.op("Slice", b.op("Shape", x), b.constant([start]), b.constant([end]), b.constant([0]))


EXPANSIONS: Mapping[str, Expansion] = {
    "Attention": _attention,
    "TensorScatter": _cache_update,
    "RotaryEmbedding": _rotary_embedding,
    "RMSNormalization": _rms_norm,
    "LayerNormalization": _layer_norm,
    "Gelu": _gelu,
    "Shape": _shape,
}


def _expansion(node: ir.Node) -> Expansion | None:
    """Return how to write ``node`` in basic operators; None: it is one."""
    return EXPANSIONS.get(node.op_type) if node.op_type != "Shape" or node.attributes else None


def _input(node: ir.Node, at: int) -> ir.Value:
    value = node.inputs[at]
    assert value is not None, f"{node.name} lacks input {at}"
    return value


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, f"{value.name} has no dtype"
    return value.dtype


def _is_constant(node: ir.Node) -> bool:
    """Whether a node computes from small constants alone; weights are in other files."""
    return bool(node.inputs) and all(
        value is not None and isinstance(value.const_value, ir.Tensor) for value in node.inputs
    )


def _computed(node: ir.Node, feeds: Mapping[str, Any], opset: int) -> list[Any]:
    """Return the outputs of a standard node, computed by ONNX's own reference in Python."""
    inputs, outputs = ([onnx.ValueInfoProto(name=value.name) for value in side] for side in (node.inputs, node.outputs))
    graph = onnx.helper.make_graph([ir.to_proto(node)], "constant", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return list(ReferenceEvaluator(model).run(None, feeds))
