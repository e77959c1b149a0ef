"""The gated activation of a feed-forward block, silu(gate(x)) * up(x), in three forms."""

from typing import Protocol

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, dims_of
from tandemrt.export.model.linear import Linear, packed
from tandemrt.export.model.weights import Weights
from tandemrt.plugins.operators import DOMAIN


class GatedActivation(Protocol):
    """[..., hidden] to [..., intermediate], by two products of that width."""

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear, up: Linear, *, layer: int
    ) -> ir.Value: ...


def explicit_silu(b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear, up: Linear, *, layer: int) -> ir.Value:
    """Two products and standard operators, which give ``activated.<layer>``."""
    gated, raised = gate(b, x, w), up(b, x, w)
    activated = b.op("Mul", b.op("Mul", gated, b.op("Sigmoid", gated)), raised)
    activated.name = f"activated.{layer}"
    return activated


def packed_silu(b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear, up: Linear, *, layer: int) -> ir.Value:
    """One product and standard operators, which give ``activated.<layer>``."""
    both = packed(gate, up)(b, x, w)
    gated, raised = b.ops("Split", both, b.constant([gate.width, up.width]), outputs=2, axis=2)
    activated = b.op("Mul", b.op("Mul", gated, b.op("Sigmoid", gated)), raised)
    activated.name = f"activated.{layer}"
    return activated


def packed_swiglu(b: GraphBuilder, x: ir.Value, w: Weights, gate: Linear, up: Linear, *, layer: int) -> ir.Value:
    """One product, ``gate_up.<layer>``, and the operator ``swiglu``, which gives ``activated.<layer>``."""
    gate_up = packed(gate, up)(b, x, w)
    gate_up.name = f"gate_up.{layer}"
    shape = (*dims_of(gate_up)[:-1], gate.width)
    (activated,) = b.custom("swiglu", gate_up, domain=DOMAIN, outputs=[(w.dtype, shape)])
    activated.name = f"activated.{layer}"
    return activated
