"""Products with stored weights as operators of the project, so that what multiplies can be chosen."""

import onnx_ir as ir

from tandemrt.engines.errors import BadRecipe, quoted
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.builder import dims_of
from tandemrt.plugins.functions.linear import linear
from tandemrt.plugins.operators import DOMAIN

STEP = 8  # what inputs and outputs of such a product must be a multiple of
_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "If", "Loop")  # of the library, or with products inside


def make_products_steps(model: ir.Model) -> None:
    """Make every MatMul by the transpose of a stored weight the operator ``linear``, in place.

    Requires nodes in order and a dtype and a shape of every value. Leaves a graph of the same values. Raises BadRecipe
    if something is left that may round a token otherwise among others.
    """
    for node in list(model.graph):
        turned = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if turned is None or turned.op_type != "Transpose":
            continue
        [product], weight = node.outputs, turned.inputs[0]
        assert weight is not None
        if any(not isinstance(dim, int) or dim % STEP for dim in dims_of(weight)):
            raise BadRecipe(
                f"backend.batch_invariant needs inputs and outputs of products in multiples of {STEP}; "
                f"{quoted(str(node.name))} has {list(dims_of(weight))}; drop it"
            )
        step = ir.node(
            "linear",
            [node.inputs[0], weight],
            domain=DOMAIN,
            outputs=[ir.Value(name=product.name, shape=product.shape, type=product.type)],
            name=node.name,
        )
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [step], [product], step.outputs)
        if not turned.outputs[0].uses():
            model.graph.remove(turned, safe=True)
        body = linear()
        model.functions[body.identifier()] = body
    if left := [node for node in model.graph if not _batch_invariant(node)]:
        raise BadRecipe(
            f"backend.batch_invariant has no {left[0].op_type}, which {quoted(str(left[0].name))} of the target is; "
            "drop it, or choose weights in bfloat16, float16 or float8 without experts"
        )


def _batch_invariant(node: ir.Node) -> bool:
    return SCHEMAS[node.op_type].batch_invariant if node.domain == DOMAIN else node.op_type not in _PRODUCTS
