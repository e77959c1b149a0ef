"""The activation of an MLP: activation(gate(x)) * up(x), or activation(up(x)) without a gate."""

from typing import Protocol

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.read.layer import Activation, ClampedSwiglu
from tandemrt.plugins.functions.swiglu import swiglu
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tandemrt.plugins.operators.constants import DOMAIN


class GatedActivation(Protocol):
    """Compute ``activated.<layer>`` [..., intermediate] of an MLP from ``x`` [..., hidden]."""

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
    ) -> ir.Value: ...


def separate_matmuls(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """Append a matmul each for gate and up, then the activation in standard operators."""
    gate_output = None if gate is None else gate(b, x, w)
    return _activate_and_name(b, gate_output, up(b, x, w), kind, layer)


def joined_matmul(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """Append one merged matmul for gate and up, then the activation in standard operators."""
    if gate is None:
        return _activate_and_name(b, None, up(b, x, w), kind, layer)
    both = merge_linears(gate, up)(b, x, w)
    gate_output, up_output = b.ops("Split", both, b.constant([gate.width, up.width]), outputs=2, axis=-1)
    return _activate_and_name(b, gate_output, up_output, kind, layer)


def joined_matmul_and_swiglu(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """Append one merged matmul, ``gate_up.<layer>``, and the operator ``swiglu``.

    An MLP without a gate, or with another activation than silu, uses standard operators.
    """
    if gate is None or kind != "silu":
        return joined_matmul(b, x, w, gate, up, kind=kind, layer=layer)
    gate_up = merge_linears(gate, up)(b, x, w)
    gate_up.name = f"gate_up.{layer}"
    shape = (*dims_of(gate_up)[:-1], gate.width)
    (activated,) = b.custom("swiglu", gate_up, domain=DOMAIN, outputs=[(w.dtype, shape)])
    activated.name = f"activated.{layer}"
    return activated


def joined_matmul_and_kernel(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """Append as joined_matmul_and_swiglu does if a C compiler builds the operator's kernel here, in float32."""
    if gate is None or kind != "silu" or w.dtype != "float32" or not has_kernels():
        return joined_matmul(b, x, w, gate, up, kind=kind, layer=layer)
    b.add_function("swiglu", swiglu)
    return joined_matmul_and_swiglu(b, x, w, gate, up, kind=kind, layer=layer)


def _activate_and_name(
    b: GraphBuilder, gate_output: ir.Value | None, up_output: ir.Value, kind: Activation, layer: int
) -> ir.Value:
    activated = activate(b, gate_output, up_output, kind)
    activated.name = f"activated.{layer}"
    return activated


def activate(b: GraphBuilder, gate_output: ir.Value | None, up_output: ir.Value, kind: Activation) -> ir.Value:
    """Return activation(gated) * raised, or activation(raised), in standard operators."""
    return (
        _activated(b, up_output, kind)
        if gate_output is None
        else b.op("Mul", _activated(b, gate_output, kind), up_output)
    )


def clamped_swiglu(b: GraphBuilder, gate: ir.Value, up: ir.Value, how: ClampedSwiglu, dtype: str) -> ir.Value:
    """Return (up + offset) * gate * sigmoid(alpha * gate), clamped as ``how`` says, in standard operators."""
    limit = b.constant(how.limit, dtype)
    if not how.clamped_after:
        gate = b.op("Min", gate, limit)
    up = clipped(b, up, how.limit, dtype)
    glu = b.op("Mul", gate, b.op("Sigmoid", scaled_by(b, gate, how.alpha, dtype)))
    if how.clamped_after:
        glu = b.op("Min", glu, limit)
    return b.op("Mul", b.op("Add", up, b.constant(how.offset, dtype)) if how.offset else up, glu)


def clipped(b: GraphBuilder, x: ir.Value, bound: float, dtype: str) -> ir.Value:
    """Return ``x`` in ``dtype`` between -``bound`` and ``bound``.

    It is clipped in float32 if ``dtype`` is bfloat16, in which onnxruntime does not clip on a GPU.
    """
    wide = "float32" if dtype == "bfloat16" else dtype
    return b.cast(b.op("Clip", b.cast(x, wide), b.constant(-bound, wide), b.constant(bound, wide)), dtype)


def xielu(b: GraphBuilder, x: ir.Value, w: Weights, name: str) -> ir.Value:
    """Return xIELU (arXiv 2411.13010) of ``x``, computed in float32, with the learned parameters of ``name``."""
    wide = b.cast(x, "float32")
    names = (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
    positive, negative, beta, least = (b.cast(w.stored(f"{name}.{part}", shape), "float32") for part, shape in names)
    positive, negative = b.op("Softplus", positive), b.op("Add", beta, b.op("Softplus", negative))
    exponential = b.op("Sub", b.op("Exp", b.op("Min", wide, least)), b.constant(1.0, "float32"))
    is_positive = b.op("Greater", wide, b.constant(0.0, "float32"))
    bent = b.op("Where", is_positive, b.op("Mul", wide, wide), b.op("Sub", exponential, wide))
    factor = b.op("Where", is_positive, positive, negative)
    return b.cast(b.op("Add", b.op("Mul", bent, factor), b.op("Mul", wide, beta)), w.dtype)


def _activated(b: GraphBuilder, x: ir.Value, kind: Activation) -> ir.Value:
    match kind:
        case "silu":
            return b.op("Mul", x, b.op("Sigmoid", x))
        case "gelu":
            return b.op("Gelu", x)
        case "gelu_tanh":
            return b.op("Gelu", x, approximate="tanh")
        case "relu":
            return b.op("Relu", x)
        case "relu2":
            positive = b.op("Relu", x)
            return b.op("Mul", positive, positive)
