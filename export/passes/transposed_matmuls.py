"""Fuse Transpose into MatMul, so that matmuls read weights in the layout of the checkpoint."""

from collections.abc import Iterator

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY
from tandemrt.export.passes.graph_pass import graph_pass


def no_transposed_matmul(model: ir.Model) -> str | None:
    """No MatMul by a transposed matrix is left."""
    return next((f"{matmul.name} is left" for matmul, _ in _transposed_matmuls(model)), None)


@graph_pass(ensures=(no_transposed_matmul,))
def fuse_transposed_matmuls(model: ir.Model) -> int:
    """Replace every MatMul by a transposed matrix with one FusedMatMul; values stay the same.

    Otherwise onnxruntime would transpose and copy every weight when it loads the graph, with no gain for draft
    windows (docs/benchmarks.md).
    """
    count = 0
    for matmul, transpose in list(_transposed_matmuls(model)):
        [result] = matmul.outputs
        fused = ir.node(
            "FusedMatMul",
            [matmul.inputs[0], transpose.inputs[0]],
            {"transB": 1},
            domain=LIBRARY,
            outputs=[ir.Value(name=result.name, shape=result.shape, type=result.type)],
            name=matmul.name,
        )
        graph = matmul.graph
        assert isinstance(graph, ir.Graph), "no matmul is in a function body"
        ir.convenience.replace_nodes_and_values(graph, matmul, [matmul], [fused], [result], fused.outputs)
        if not transpose.outputs[0].uses():
            graph.remove(transpose, safe=True)
        model.opset_imports.setdefault(LIBRARY, 1)
        count += 1
    return count


def _transposed_matmuls(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield every MatMul by a transposed matrix, nested graphs included, and its Transpose."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        transpose = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if transpose is None or transpose.op_type != "Transpose" or _permutation(transpose) != [1, 0]:
            continue
        yield node, transpose


def _permutation(node: ir.Node) -> list[int]:
    permutation = node.attributes.get("perm")
    return list(permutation.as_ints()) if permutation is not None else []
