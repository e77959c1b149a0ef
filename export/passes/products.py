"""Products that read a weight as the checkpoint stores it."""

import onnx_ir as ir

from tandemrt.export.model.builder import LIBRARY


def fuse_transposed_products(model: ir.Model) -> None:
    """Make every MatMul by a transposed matrix one FusedMatMul, in place.

    Requires onnxruntime; leaves a graph of the same values. onnxruntime would turn every weight around when it loads,
    and a window is no faster for it (docs/benchmarks.md).
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        turned = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if turned is None or turned.op_type != "Transpose" or _permutation(turned) != [1, 0]:
            continue
        [product] = node.outputs
        fused = ir.node(
            "FusedMatMul",
            [node.inputs[0], turned.inputs[0]],
            {"transB": 1},
            domain=LIBRARY,
            outputs=[ir.Value(name=product.name, shape=product.shape, type=product.type)],
            name=node.name,
        )
        graph = node.graph
        assert isinstance(graph, ir.Graph), "no product stands in a function"
        ir.convenience.replace_nodes_and_values(graph, node, [node], [fused], [product], fused.outputs)
        if not turned.outputs[0].uses():
            graph.remove(turned, safe=True)
        model.opset_imports.setdefault(LIBRARY, 1)


def _permutation(node: ir.Node) -> list[int]:
    permutation = node.attributes.get("perm")
    return list(permutation.as_ints()) if permutation is not None else []
