"""Fuse RMS norms, with or without a residual add, into onnxruntime's SkipSimplifiedLayerNormalization, or into
``residual_norm`` if their weight is wider than the stream, or if they follow a sum over ranks.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, dims_of
from tandemrt.export.passes.graph_pass import graph_pass, nodes_in_order, values_typed
from tandemrt.plugins.functions.residual_norm import residual_norm
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tandemrt.plugins.operators.constants import DOMAIN

_OPERATOR = "SkipSimplifiedLayerNormalization"


def no_residual_norm(model: ir.Model) -> str | None:
    """No residual add and norm that fuse_residual_norms would fuse are left."""
    return next((f"{norm.name} is left" for norm, _ in _residual_norms(model.graph)), None)


def no_lone_norm(model: ir.Model) -> str | None:
    """No norm that fuse_lone_norms would replace is left."""
    return next((f"{norm.name} is left" for norm, *_ in _lone_norms(model.graph)), None)


@graph_pass(requires=(nodes_in_order, values_typed), ensures=(nodes_in_order, values_typed, no_residual_norm))
def fuse_residual_norms(model: ir.Model) -> int:
    """Replace every Add(skip, x) and the RMSNormalization of it with one SkipSimplifiedLayerNormalization.

    The operator also returns the sum. A bias vector that was added to ``x`` before becomes the operator's bias. A sum
    that another node reads before the norm is not fused.
    """
    count = 0
    order = _order(model.graph)
    for norm in list(model.graph):
        add = _fusable_add(norm, order)
        if add is None:
            continue
        skip, x = add.inputs
        assert x is not None, "an Add has two inputs"
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
        count += 1
    return count


@graph_pass(requires=(values_typed, no_residual_norm), ensures=(nodes_in_order, values_typed, no_lone_norm))
def fuse_lone_norms(model: ir.Model) -> int:
    """Replace every other RMSNormalization in float32 or bfloat16 with SkipSimplifiedLayerNormalization of x + x.

    On a GPU onnxruntime's kernel for it takes a third of the time of its kernel for a norm alone. Doubling is exact, so
    with four times the epsilon the values are the same. A norm in float16 stays, because the sum might overflow.
    """
    count = 0
    for norm, x, weight in list(_lone_norms(model.graph)):
        outputs = [ir.Value(name=norm.outputs[0].name, shape=norm.outputs[0].shape, type=norm.outputs[0].type)]
        attributes = {"epsilon": 4 * norm.attributes.get_float("epsilon", 1e-5)}
        fused = ir.node(_OPERATOR, [x, x, weight], attributes, domain=LIBRARY, outputs=outputs, name=norm.name)
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm], [fused], norm.outputs, outputs)
        model.graph.opset_imports.setdefault(LIBRARY, 1)
        count += 1
    return count


@graph_pass(requires=(nodes_in_order, values_typed), ensures=(nodes_in_order, values_typed))
def fuse_wide_norms(model: ir.Model) -> int:
    """Replace every Add(skip, x) in 16 bits and the norm of it by a float32 weight with one ``residual_norm``.

    Such a norm is a Cast to float32, an RMSNormalization and a Cast back.
    """
    count, order = 0, _order(model.graph)
    for norm in list(model.graph):
        match = _wide_norm(norm, order)
        if match is None:
            continue
        add, widened, narrowed = match
        fused = _residual_norm(norm, *add.inputs, norm.inputs[1])
        order[fused] = order[norm]
        replaced = [narrowed.outputs[0], add.outputs[0]]
        ir.convenience.replace_nodes_and_values(
            model.graph, norm, [narrowed, norm, widened, add], [fused], replaced, fused.outputs
        )
        count += 1
    if count:
        _add_function(model)
    return count


@graph_pass(requires=(values_typed, no_residual_norm), ensures=(nodes_in_order, values_typed))
def use_residual_norm_kernel(model: ir.Model) -> int:
    """Replace every SkipSimplifiedLayerNormalization in float32 without a bias with ``residual_norm``.

    The operator's C kernel takes less time for few rows. Without a C compiler nothing is replaced.
    """
    count = 0
    for norm in [each for each in model.graph if has_kernels() and _has_kernel(each)]:
        x, skip, weight = norm.inputs
        fused = _residual_norm(norm, skip, x, weight)
        replaced = [norm.outputs[0], norm.outputs[3]]
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm], [fused], replaced, fused.outputs)
        count += 1
    if count:
        _add_function(model)
    return count


@graph_pass(requires=(nodes_in_order, values_typed), ensures=(nodes_in_order, values_typed))
def fuse_norms_of_sums(model: ir.Model) -> int:
    """Replace every Add(skip, x) and the norm of it with one ``residual_norm``, if ``x`` is a sum over ranks.

    Its kernel lets the next matmul begin to read its weight while the ranks still add.
    """
    count, order = 0, _order(model.graph)
    for norm in list(model.graph):
        add, weight = _fusable_add(norm, order), norm.inputs[1] if len(norm.inputs) > 1 else None
        if add is None or weight is None or int(dims_of(weight)[-1]) % 2 or not _over_ranks(add):
            continue
        new = []
        if weight.dtype != ir.DataType.FLOAT:
            new = [ir.node("Cast", [weight], {"to": ir.DataType.FLOAT}, name=f"{norm.name}/weight")]
            (weight,) = new[0].outputs
            weight.name, weight.shape, weight.type = new[0].name, norm.inputs[1].shape, ir.TensorType(ir.DataType.FLOAT)
        fused = _residual_norm(norm, *add.inputs, weight)
        order[fused] = order[norm]
        replaced = [*norm.outputs, *add.outputs]
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm, add], [*new, fused], replaced, fused.outputs)
        count += 1
    if count:
        _add_function(model)
    return count


def lone_norm(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the input and the weight of ``node`` if it is a norm that SkipSimplifiedLayerNormalization computes.

    Such an RMSNormalization is over the last of two or three dimensions, in float32, with a weight of its input's
    dtype.
    """
    if (node.domain, node.op_type) != ("", "RMSNormalization") or not _over_last(node):
        return None
    x, weight = node.inputs
    if x is None or weight is None or weight.dtype != x.dtype or len(dims_of(x)) not in (2, 3):
        return None
    return x, weight


def _add_function(model: ir.Model) -> None:
    body = residual_norm()
    model.functions[body.identifier()] = body
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def _has_kernel(norm: ir.Node) -> bool:
    if (norm.domain, norm.op_type) != (LIBRARY, _OPERATOR) or len(norm.inputs) != 3:
        return False
    return all(value is not None and value.dtype == ir.DataType.FLOAT for value in norm.inputs)


def _order(graph: ir.Graph) -> dict[ir.Node, int]:
    return {node: place for place, node in enumerate(graph)}


def _residual_norms(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    order = _order(graph)
    for norm in graph:
        add = _fusable_add(norm, order)
        if add is not None:
            yield norm, add


def _lone_norms(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
    for norm in graph:
        match = lone_norm(norm)
        if match is not None and match[0].dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
            yield norm, *match


def _over_ranks(add: ir.Node) -> bool:
    producer = None if add.inputs[1] is None else add.inputs[1].producer()
    return producer is not None and (producer.domain, producer.op_type) == (DOMAIN, "all_reduce")


def _residual_norm(norm: ir.Node, *inputs: ir.Value | None) -> ir.Node:
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    outputs = [ir.Value(), ir.Value()]
    return ir.node("residual_norm", inputs, attributes, domain=DOMAIN, outputs=outputs, name=norm.name)


def _wide_norm(norm: ir.Node, order: Mapping[ir.Node, int]) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Return the Add and the two Casts around ``norm``, or None if it is no norm in float32 of a narrower sum."""
    if (norm.domain, norm.op_type) != ("", "RMSNormalization") or not _over_last(norm) or norm.inputs[0] is None:
        return None
    widened, readers = norm.inputs[0].producer(), [use.node for use in norm.outputs[0].uses()]
    if widened is None or widened.op_type != "Cast" or len(widened.outputs[0].uses()) != 1 or len(readers) != 1:
        return None
    (narrowed,), total = readers, widened.inputs[0]
    add = None if total is None else total.producer()
    if narrowed.op_type != "Cast" or total is None or add is None or (add.domain, add.op_type) != ("", "Add"):
        return None
    skip, x = add.inputs
    if skip is None or x is None or dims_of(skip) != dims_of(x) or narrowed.outputs[0].dtype != total.dtype:
        return None
    early = any(order[each] < order[widened] for each in total.consumers() if each is not widened)
    return None if early or int(dims_of(x)[-1]) % 2 else (add, widened, narrowed)


def _fusable_add(norm: ir.Node, order: Mapping[ir.Node, int]) -> ir.Node | None:
    """Return the residual add of ``norm``, or None if another node reads the sum before the norm."""
    add = _residual_add(norm)
    if add is None or any(order[reader] < order[norm] for reader in add.outputs[0].consumers()):
        return None
    return add


def _residual_add(norm: ir.Node) -> ir.Node | None:
    """Return the Add of two equal shapes that ``norm`` (over the last dimension, in float32) reads, or None."""
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
    """Return the Add of a bias vector that produces ``x``, if ``x`` has one reader, else None."""
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
