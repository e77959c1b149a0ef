"""A residual add and the norm behind it as one operator of onnxruntime, and norms by themselves as the same one."""

import onnx_ir as ir

from tandemrt.export.model.builder import LIBRARY, dims_of

_OPERATOR = "SkipSimplifiedLayerNormalization"


def fuse_residual_norms(model: ir.Model) -> None:
    """Make every RMSNormalization of a sum one SkipSimplifiedLayerNormalization, in place.

    The sum is Add(skip, x); a vector that was added to ``x`` in front of it becomes the operator's bias. Requires
    onnxruntime, nodes in order, and a dtype and a shape of every value. Leaves a graph of the same values, the sum
    among them; what only led to a sum is gone. A sum that is read in front of its norm stays as it is.
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
    """
    order = {node: place for place, node in enumerate(model.graph)}
    for norm in list(model.graph):
        add = _residual_add(norm)
        if add is None or any(order[reader] < order[norm] for reader in add.outputs[0].consumers()):
            continue
        skip, x = add.inputs
        bias_add = _bias_add(x)
        x, *bias = bias_add.inputs if bias_add else (x,)
        fused = _fused(norm, [x, skip, norm.inputs[1], *bias])
        order[fused] = order[norm]
        ir.convenience.replace_nodes_and_values(
            model.graph, norm, [norm, add], [fused], [*norm.outputs, *add.outputs], [fused.outputs[0], fused.outputs[3]]
        )
        if bias_add:
            model.graph.remove(bias_add, safe=True)
        model.graph.opset_imports.setdefault(LIBRARY, 1)


def fuse_lone_norms(model: ir.Model) -> None:
    """Make every other RMSNormalization in float32 or bfloat16 a SkipSimplifiedLayerNormalization of x + x, in place.

    On a GPU onnxruntime's kernel for it takes a third of the time of that for a norm alone. Doubling is exact, so with
    four times the epsilon the values are the same; float16 might not hold the sum. Requires what fuse_residual_norms
    does.
    """
    for norm in list(model.graph):
        found = lone_norm(norm)
        if found is None or found[0].dtype not in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
            continue
        x, weight = found
        outputs = [ir.Value(name=norm.outputs[0].name, shape=norm.outputs[0].shape, type=norm.outputs[0].type)]
        attributes = {"epsilon": 4 * norm.attributes.get_float("epsilon", 1e-5)}
        joined = ir.node(_OPERATOR, [x, x, weight], attributes, domain=LIBRARY, outputs=outputs, name=norm.name)
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm], [joined], norm.outputs, outputs)
        model.graph.opset_imports.setdefault(LIBRARY, 1)


def lone_norm(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """What ``node`` norms, and its weight, if it is an RMSNormalization that SkipSimplifiedLayerNormalization can do:
    over the last of two or three dimensions, in float32, by a weight of the same dtype."""
    if (node.domain, node.op_type) != ("", "RMSNormalization") or not _over_last(node):
        return None
    x, weight = node.inputs
    if x is None or weight is None or weight.dtype != x.dtype or len(dims_of(x)) not in (2, 3):
        return None
    return x, weight


def _residual_add(norm: ir.Node) -> ir.Node | None:
    """The sum of two values of one shape that ``norm`` reads, if it is a norm over the last dimension in float32."""
    if (norm.domain, norm.op_type) != ("", "RMSNormalization") or norm.inputs[0] is None:
        return None
    add = norm.inputs[0].producer()
    if not _over_last(norm) or add is None or (add.domain, add.op_type) != ("", "Add"):
        return None
    skip, x = add.inputs
    return add if skip is not None and x is not None and dims_of(skip) == dims_of(x) else None


def _over_last(norm: ir.Node) -> bool:
    return (norm.attributes.get_int("axis", -1), norm.attributes.get_int("stash_type", 1)) == (-1, 1)


def _bias_add(x: ir.Value) -> ir.Node | None:
    """The node that adds a vector to a value of the same width and gives ``x``, if nobody else reads ``x``."""
    node = x.producer()
    if node is None or (node.domain, node.op_type) != ("", "Add") or len(x.uses()) > 1 or x.is_graph_output():
        return None
    before, bias = node.inputs
    vector = before is not None and bias is not None and dims_of(bias) == dims_of(before)[-1:]
    return node if vector else None


def _fused(norm: ir.Node, inputs: list[ir.Value | None]) -> ir.Node:
    outputs = [ir.Value(), ir.Value(name=""), ir.Value(name=""), ir.Value()]  # normed, mean, deviation, sum
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    return ir.node(_OPERATOR, inputs, attributes, domain=LIBRARY, outputs=outputs, name=norm.name)
