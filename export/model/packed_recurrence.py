"""Recurrent layers over a paged cache, by the project's operators: packed calls of draft windows and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.recurrence import Held
from tandemrt.export.read.recurrent_layers import DeltaNet, RecurrentLayers
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN


@dataclass(frozen=True)
class DeltaNetWeights:
    """``convolution`` [channels, 1, kernel], ``decay_scale`` and ``dt_bias`` float32 [value_heads]."""

    convolution: ir.Value
    decay_scale: ir.Value
    dt_bias: ir.Value


@dataclass(frozen=True)
class PackedCall:
    """A packed call of the recurrent layers of a graph. ``ids``: the token ids of the call.

    ``place``: positions of the tokens and of the states, by the operator's input names.
    """

    spec: ModelSpec
    ids: ir.Value
    place: Mapping[str, ir.Value]

    @classmethod
    def over_slots(
        cls,
        b: GraphBuilder,  # noqa: ARG003
        spec: ModelSpec,
        net: RecurrentLayers,  # noqa: ARG003
        graph_inputs: Mapping[str, ir.Value],
    ) -> "PackedCall":
        """Find the inputs that all layers share."""
        names = [binding.name for binding in SCHEMAS["gated_delta_net"].inputs if binding.name in graph_inputs]
        return cls(spec, graph_inputs["token_ids"], {name: graph_inputs[name] for name in names})

    def matmul(self, b: GraphBuilder, x: ir.Value, w: Weights, linear: Linear) -> ir.Value:
        """Return the product for the call's tokens."""
        return linear(b, x, w)

    def delta_net(
        self, b: GraphBuilder, mixed: ir.Value, weights: "DeltaNetWeights", net: DeltaNet, held: Held, dtype: str
    ) -> tuple[ir.Value, Held]:
        """Append the operator; return its output [tokens, net.mixed] and what the slots hold."""
        assert held.state is not None
        recent, state = held.recent, held.state
        weight = b.op("Reshape", weights.convolution, b.constant([net.channels, net.kernel]))
        out, state, recent = b.custom(
            "gated_delta_net",
            *(mixed, state, recent, weight, weights.decay_scale, weights.dt_bias, *self.place.values()),
            domain=DOMAIN,
            outputs=[
                (dtype, (*dims_of(mixed)[:-1], net.mixed)),
                ("float32", dims_of(state)),
                (dtype, dims_of(recent)),
            ],
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            update_scale=net.update_scale,
        )
        return out, Held(recent, state)
