"""A gated short convolution (LFM2): the operator ``short_convolution``, on a CPU operators of onnxruntime."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.packed_recurrence import PackedCall
from tandemrt.export.model.recent_tokens import cut_tokens
from tandemrt.export.model.recurrence import Held, RecurrentCall, convolved
from tandemrt.export.read.recurrent_layers import ShortConvolution


def short_convolution(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    name: str,
    net: ShortConvolution,
    call: RecurrentCall | PackedCall,
    past: Held,
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py): after * convolution(before * values), with two gates."""
    projected = call.matmul(b, x, w, Linear.stored(f"{name}.in_proj", 3 * net.channels, bias=net.bias))
    if isinstance(call, PackedCall):
        weight = w.stacked([f"{name}.conv1d.weight"], [net.channels], (1, net.kernel))
        bias = w(f"{name}.conv1d.bias", (net.channels,)) if net.bias else None
        return call.short_convolution(b, projected, weight, bias, past, w.dtype)
    before, after, values = b.ops("Split", projected, b.constant([net.channels] * 3), outputs=3, axis=2)
    mixed = b.op("Mul", before, values)
    ordered, earlier = call.earlier(b, past.recent, w.dtype)
    lead = cut_tokens(b, earlier, start=b.constant([1 - net.kernel]))
    out = convolved(b, mixed, lead, w, [f"{name}.conv1d"], [net.channels], kernel=net.kernel, bias=net.bias)
    return b.op("Mul", after, out), Held(call.tokens.store(b, ordered, mixed))
