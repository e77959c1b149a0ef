"""Join what the ranks of a tensor-parallel target compute: sums of partial matmuls, and columns of the logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract.operators import EXPERTS
from tandemrt.export.graph.builder import dims_of
from tandemrt.export.passes.graph_pass import GraphPass, nodes_in_order, values_typed
from tandemrt.export.passes.residual_norms import fuse_norms_of_sums
from tandemrt.plugins.operators.constants import DOMAIN

# Of operators that multiply by quantized weights
_WEIGHT_INPUT = {"scaled_matmul": 2, "int4_matmul": 1, "int8_matmul": 1, "float4_matmul": 1}
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


def over_ranks(rank: int, ranks: int, split_by_inputs: Callable[[str], bool]) -> tuple[GraphPass, ...]:
    """Return the passes for a graph of the shard of ``rank`` of ``ranks``, which run before all others."""
    return join_ranks(rank, ranks, split_by_inputs), fuse_norms_of_sums


def join_ranks(rank: int, ranks: int, split_by_inputs: Callable[[str], bool]) -> GraphPass:
    """Return the pass for ``rank`` of ``ranks``, on a graph of that rank's shard.

    Every matmul by a matrix whose name is ``split_by_inputs`` gets an ``all_reduce`` of its result, and so do experts;
    a bias follows the sum. The matmul of an unquantized head gets a range of the rows of its weight, and an
    ``all_gather`` of the logits. A quantized head is whole on every rank. Where two such results are added, as those of
    experts and of a shared expert are, the ranks exchange the sum of both.
    """

    def rewrite(model: ir.Model) -> int:
        matmuls = list(_stored_matmuls(model.graph))
        partial = [each.matmul for each in matmuls if split_by_inputs(str(each.weight.name))]
        partial += [n for n in model.graph if _is_of_experts(n) or split_by_inputs(_weight_of_operator(n))]
        heads = [each for each in matmuls if each.weight.name in _HEADS]
        for node in partial:
            summed = _after(model.graph, node, "all_reduce", {})
            summed.shape = node.outputs[0].shape
        for each in heads:
            _split_head(model.graph, each, rank, ranks)
        joined = sum(_exchange_once(model.graph, node) for node in list(model.graph) if node.op_type == "Add")
        return len(partial) + len(heads) - joined

    return GraphPass("join_ranks", rewrite, (nodes_in_order, values_typed), (nodes_in_order, values_typed))


@dataclass(frozen=True)
class _StoredMatmul:
    """A matmul by the transpose of a stored ``weight``; ``cast``: its conversion to the compute dtype, if any."""

    matmul: ir.Node
    transpose: ir.Node
    cast: ir.Node | None
    weight: ir.Value


def _stored_matmuls(graph: ir.Graph) -> Iterator[_StoredMatmul]:
    for node in graph:
        transpose = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if transpose is None or transpose.op_type != "Transpose" or (source := transpose.inputs[0]) is None:
            continue
        cast = source.producer()
        weight = source if cast is None else cast.inputs[0]
        if weight is not None and isinstance(weight.const_value, ir.ExternalTensor):
            yield _StoredMatmul(node, transpose, cast, weight)


def _weight_of_operator(node: ir.Node) -> str:
    """Return the name of the quantized weight that ``node`` multiplies by, or ""."""
    if not any(_is(node, name) for name in _WEIGHT_INPUT):
        return ""
    weight = node.inputs[_WEIGHT_INPUT[node.op_type]]
    return "" if weight is None else str(weight.name)


def _is_of_experts(node: ir.Node) -> bool:
    return any(_is(node, name) for name in EXPERTS)


def _is(node: ir.Node, operator: str) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, operator)


def _exchange_once(graph: ir.Graph, add: ir.Node) -> bool:
    """Move the sums over ranks of both inputs of ``add`` after it, if it adds two; return whether it does."""
    sums = [_sum_over_ranks(value) for value in add.inputs]
    parts = [each.inputs[0] for each in sums if each is not None]
    if len(parts) < 2:
        return False
    for each, part in zip(sums, parts, strict=True):
        assert each is not None
        ir.convenience.replace_all_uses_with(each.outputs[0], part)
        graph.remove(each, safe=True)
    summed = _after(graph, add, "all_reduce", {})
    summed.shape = add.outputs[0].shape
    return True


def _sum_over_ranks(value: ir.Value | None) -> ir.Node | None:
    """Return the ``all_reduce`` whose result ``value`` is, or is after multiplications by what all ranks have."""
    if value is None or len(value.uses()) != 1 or value.is_graph_output() or (node := value.producer()) is None:
        return None
    if node.op_type != "Mul":
        return node if _is(node, "all_reduce") else None
    sums = [each for each in map(_sum_over_ranks, node.inputs) if each is not None]
    return sums[0] if len(sums) == 1 else None


def _split_head(graph: ir.Graph, head: _StoredMatmul, rank: int, ranks: int) -> None:
    """Multiply by the rows of ``rank``. All ranks have equally many, so the last ones may repeat some."""
    vocab = int(dims_of(head.weight)[0])
    count = -(-vocab // ranks)
    weight = _rows(head.weight, min(rank * count, vocab - count), count)
    graph.register_initializer(weight)
    nodes: list[ir.Node] = []
    for node in (head.cast, head.transpose):
        if node is not None:
            nodes.append(_copy(node, nodes[-1].outputs[0] if nodes else weight))
    graph.insert_before(head.matmul, nodes)
    head.matmul.replace_input_with(1, nodes[-1].outputs[0])
    if not head.transpose.outputs[0].uses():
        graph.remove(head.transpose, safe=True)
    logits = head.matmul.outputs[0]
    gathered = _after(graph, head.matmul, "all_gather", {"width": vocab})
    gathered.shape = logits.shape
    logits.shape = ir.Shape([*dims_of(logits)[:-1], count])


def _rows(weight: ir.Value, begin: int, count: int) -> ir.Value:
    """Return the weight of ``count`` rows of ``weight`` from ``begin`` on, in the same file."""
    stored = weight.const_value
    assert isinstance(stored, ir.ExternalTensor)
    rows, *shape = dims_of(weight)
    each, name = stored.nbytes // int(rows), f"{weight.name}.rows"
    offset = (stored.offset or 0) + begin * each
    part = ir.ExternalTensor(
        stored.location, offset, count * each, stored.dtype, shape=ir.Shape([count, *shape]), name=name
    )
    return ir.Value(name=name, const_value=part, shape=part.shape, type=ir.TensorType(part.dtype))


def _copy(node: ir.Node, x: ir.Value) -> ir.Node:
    """Return a Cast or a Transpose of ``x`` like ``node``."""
    copied = ir.Node("", node.op_type, [x], node.attributes.values(), name=f"{node.name}/rows")
    result, dims = copied.outputs[0], dims_of(x)
    result.name, result.type = copied.name, node.outputs[0].type
    result.shape = ir.Shape(dims[::-1] if node.op_type == "Transpose" else dims)
    return copied


def _after(graph: ir.Graph, node: ir.Node, operator: str, attributes: dict[str, int]) -> ir.Value:
    """Insert ``operator`` after ``node``, for all readers of its output; return its result, without a shape."""
    (value,) = node.outputs
    readers = list(value.uses())
    joined = ir.node(operator, [value], attributes, domain=DOMAIN, name=f"{node.name}/{operator}")
    result = joined.outputs[0]
    result.name, result.type = f"{value.name}/{operator}", value.type
    graph.insert_after(node, joined)
    for use in readers:
        use.node.replace_input_with(use.idx, result)
    if value.is_graph_output():  # the result has the output's name from now on
        at = graph.outputs.index(value)
        result.name, value.name = value.name, f"{value.name}/part"
        graph.outputs[at] = result
    graph.opset_imports.setdefault(DOMAIN, 1)
    return result
