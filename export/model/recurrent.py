"""The recurrent layers of a graph: the function of each kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.gated_delta_net import gated_delta_net
from tandemrt.export.model.kimi_delta import kimi_delta
from tandemrt.export.model.mamba2 import mamba2
from tandemrt.export.model.packed_recurrence import PackedCall
from tandemrt.export.model.recurrence import Held, RecurrentCall
from tandemrt.export.model.row_padding import is_padded, pad_as
from tandemrt.export.model.short_convolution import short_convolution
from tandemrt.export.read.recurrent_layers import DeltaNet, KimiDelta, Mamba2, RecurrentLayers, ShortConvolution

# A function gets the layer's normed input [batch, tokens, hidden], the prefix of its weights, and what the slots hold.
# It returns [batch, tokens, mixed], the input of the output matmul, and what the slots hold after the call. Over a
# paged cache (PackedCall) these have no batch.
FUNCTIONS: Mapping[type[RecurrentLayers], Callable[..., tuple[ir.Value, Held]]] = {
    DeltaNet: gated_delta_net,
    KimiDelta: kimi_delta,
    Mamba2: mamba2,
    ShortConvolution: short_convolution,
}


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a graph."""

    net: RecurrentLayers
    call: RecurrentCall | PackedCall

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, name: str, layer: int, graph_inputs: Mapping[str, ir.Value]
    ) -> tuple[ir.Value, dict[str, ir.Value]]:
        """Return [..., mixed] for ``x`` [..., hidden], and outputs by their contract names.

        ``name`` is the prefix of the layer's weights.
        """
        names: dict[str, Any] = {"recent": f"recent.{layer}"} | ({"state": f"state.{layer}"} if self.net.state else {})
        past = Held(**{kind: graph_inputs[f"past_{each}"] for kind, each in names.items()})
        mixed, left = FUNCTIONS[type(self.net)](b, x, w, name, self.net, self.call, past)
        mixed.shape = ir.Shape((*dims_of(self.call.ids), self.net.mixed))
        if isinstance(self.call, RecurrentCall) and is_padded(x):
            mixed = pad_as(b, mixed, self.call.tokens.count, x)
        return mixed, {f"present_{each}": getattr(left, kind) for kind, each in names.items()}
