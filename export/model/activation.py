"""What stands between the products of a feed-forward block: activation(gate(x)) * up(x), or activation(up(x))."""

from typing import Protocol

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, dims_of
from tandemrt.export.model.linear import Linear, packed
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.block import Activation, ClampedSwiglu
from tandemrt.plugins.operators import DOMAIN


class GatedActivation(Protocol):
    """[..., hidden] to [..., intermediate], ``activated.<layer>``, by one or two products of that width."""

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
    ) -> ir.Value: ...


def two_products(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """Each product by itself, and standard operators."""
    gated = None if gate is None else gate(b, x, w)
    return _joined(b, gated, up(b, x, w), kind, layer)


def one_product(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """One wide product, and standard operators."""
    if gate is None:
        return _joined(b, None, up(b, x, w), kind, layer)
    both = packed(gate, up)(b, x, w)
    gated, raised = b.ops("Split", both, b.constant([gate.width, up.width]), outputs=2, axis=-1)
    return _joined(b, gated, raised, kind, layer)


def one_product_and_operator(
    b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear | None, up: Linear, *, kind: Activation, layer: int
) -> ir.Value:
    """One wide product, ``gate_up.<layer>``, and the operator ``swiglu``; standard operators for what that is not."""
    if gate is None or kind != "silu":
        return one_product(b, x, w, gate, up, kind=kind, layer=layer)
    gate_up = packed(gate, up)(b, x, w)
    gate_up.name = f"gate_up.{layer}"
    shape = (*dims_of(gate_up)[:-1], gate.width)
    (activated,) = b.custom("swiglu", gate_up, domain=DOMAIN, outputs=[(w.dtype, shape)])
    activated.name = f"activated.{layer}"
    return activated


def _joined(b: GraphBuilder, gated: ir.Value | None, raised: ir.Value, kind: Activation, layer: int) -> ir.Value:
    activated = activate(b, gated, raised, kind)
    activated.name = f"activated.{layer}"
    return activated


def activate(b: GraphBuilder, gated: ir.Value | None, raised: ir.Value, kind: Activation) -> ir.Value:
    """activation(gated) * raised, or activation(raised), in standard operators."""
    return _activated(b, raised, kind) if gated is None else b.op("Mul", _activated(b, gated, kind), raised)


def clamped_swiglu(b: GraphBuilder, gate: ir.Value, up: ir.Value, how: ClampedSwiglu, dtype: str) -> ir.Value:
    """(up + 1) * gate * sigmoid(alpha * gate) within bounds, in standard operators."""
    limit = b.constant(how.limit, dtype)
    gate = b.op("Min", gate, limit)
    up = b.op("Clip", up, b.constant(-how.limit, dtype), limit)
    glu = b.op("Mul", gate, b.op("Sigmoid", b.op("Mul", gate, b.constant(how.alpha, dtype))))
    return b.op("Mul", b.op("Add", up, b.constant(1, dtype)), glu)


def _activated(b: GraphBuilder, x: ir.Value, kind: Activation) -> ir.Value:
    match kind:
        case "silu":
            return b.op("Mul", x, b.op("Sigmoid", x))
        case "gelu_tanh":
            return b.op("Gelu", x, approximate="tanh")
        case "relu2":
            positive = b.op("Relu", x)
            return b.op("Mul", positive, positive)
