"""``gated_linear`` in standard operators."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body


def gated_linear() -> ir.Function:
    """x @ weight.T of gates and ups, rounded to the input's dtype; silu(gate) * up in float32, rounded."""
    body = Body.of("gated_linear")
    x, weight = body.inputs
    gate_up = body.matmul(x.cast(FLOAT32), body.op("Transpose", weight.cast(FLOAT32), perm=[1, 0]))
    gate, up = body.ops("Split", body.op("CastLike", gate_up, x), outputs=2, axis=-1, num_outputs=2)
    wide = gate.cast(FLOAT32)
    out = wide * body.op("Sigmoid", wide) * up.cast(FLOAT32)
    return body.function(activated=body.op("CastLike", out, x))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (gated_linear(),)
