"""Recurrent layers over a paged cache, by the project's operators: packed calls of draft windows and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.recurrence import Held
from tandemrt.export.read.recurrent_layers import RecurrentLayers
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN, OutputNorm


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a recurrent layer with a state.

    ``convolution`` [channels, 1, kernel], ``conv_bias`` [channels], or None. ``decay_scale``, ``dt_bias`` and ``skip``:
    float32, as the operator ``linear_attention`` has them; no ``skip``: 0. ``norm``: float32, of the output; None: it
    has no norm.
    """

    convolution: ir.Value
    decay_scale: ir.Value
    dt_bias: ir.Value
    norm: ir.Value | None
    conv_bias: ir.Value | None = None
    skip: ir.Value | None = None


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
        names = [binding.name for binding in SCHEMAS["linear_attention"].inputs if binding.name in graph_inputs]
        return cls(spec, graph_inputs["token_ids"], {name: graph_inputs[name] for name in names})

    def matmul(self, b: GraphBuilder, x: ir.Value, w: Weights, linear: Linear) -> ir.Value:
        """Return the product for the call's tokens."""
        return linear(b, x, w)

    def linear_attention(
        self,
        b: GraphBuilder,
        projected: ir.Value,
        weights: LayerWeights,
        past: Held,
        dtype: str,
        *,
        key_heads: int,
        places: Mapping[str, int],
        norm: OutputNorm = OutputNorm.BEFORE_GATE,
        norm_groups: int | None = None,
        epsilon: float,
        update_scale: float = 1.0,
        sigmoid_gate: bool = False,
    ) -> tuple[ir.Value, Held]:
        """Append the operator; return its output [tokens, value_heads * value_dim] and what the slots hold.

        ``places``: where the parts of ``projected`` are (plugins/operators/projections.py). ``norm_groups``: of outputs
        that are normed together; None: the value heads.
        """
        assert past.state is not None
        recent, state = past.recent, past.state
        value_heads, value_dim = int(dims_of(state)[1]), int(dims_of(state)[3])
        channels, _, kernel = map(int, dims_of(weights.convolution))
        out, state, recent = b.custom(
            "linear_attention",
            projected,
            state,
            recent,
            b.op("Reshape", weights.convolution, b.constant([channels, kernel])),
            self._float32(b, weights.conv_bias, channels),
            weights.decay_scale,
            weights.dt_bias,
            self._float32(b, weights.skip, value_heads),
            self._float32(b, weights.norm, 1),
            *self.place.values(),
            domain=DOMAIN,
            outputs=[
                (dtype, (*dims_of(projected)[:-1], value_heads * value_dim)),
                ("float32", dims_of(state)),
                (dtype, dims_of(recent)),
            ],
            key_heads=key_heads,
            value_heads=value_heads,
            **{"update_at": -1, "by_key_head": 0, **places},
            norm=int(norm if weights.norm is not None else OutputNorm.NONE),
            norm_groups=norm_groups or value_heads,
            epsilon=float(epsilon),
            update_scale=float(update_scale),
            sigmoid_gate=int(sigmoid_gate),
        )
        return out, Held(recent, state)

    def short_convolution(
        self, b: GraphBuilder, projected: ir.Value, weight: ir.Value, bias: ir.Value | None, past: Held, dtype: str
    ) -> tuple[ir.Value, Held]:
        """Append the operator; return its output [tokens, channels] and what the slots hold."""
        channels, _, kernel = map(int, dims_of(weight))
        names = [binding.name for binding in SCHEMAS["short_convolution"].inputs]
        out, recent = b.custom(
            "short_convolution",
            projected,
            past.recent,
            b.op("Reshape", weight, b.constant([channels, kernel])),
            self._float32(b, bias, channels),
            *(value for name, value in self.place.items() if name in names),
            domain=DOMAIN,
            outputs=[(dtype, (*dims_of(projected)[:-1], channels)), (dtype, dims_of(past.recent))],
        )
        return out, Held(recent)

    @staticmethod
    def _float32(b: GraphBuilder, value: ir.Value | None, absent: int) -> ir.Value:
        """Return ``value`` in float32; ``absent`` zeros if there is none."""
        return b.constant([0.0] * absent, "float32") if value is None else b.cast(value, "float32")
