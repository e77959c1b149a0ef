"""``swiglu`` in standard operators."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body


def swiglu() -> ir.Function:
    """gate_up [..., 2 * width] → activated [..., width]; silu(gate) * up in float32, rounded to the input's dtype."""
    body = Body.of("swiglu")
    (gate_up,) = body.inputs
    gate, up = body.ops("Split", gate_up, outputs=2, axis=-1, num_outputs=2)
    wide = gate.cast(FLOAT32)
    out = wide * body.op("Sigmoid", wide) * up.cast(FLOAT32)
    return body.function(activated=body.op("CastLike", out, gate_up))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (swiglu(),)
