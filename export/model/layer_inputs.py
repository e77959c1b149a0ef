"""Inputs of single layers for every token, and factors of the residual stream (Gemma 4)."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.activation import activate
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.read.spec import ModelSpec


def layer_inputs(
    b: GraphBuilder,
    hidden: ir.Value,
    token_ids: ir.Value,
    image_rows: ir.Value | None,
    w: Weights,
    spec: ModelSpec,
) -> tuple[ir.Value, ...]:
    """Return the input [..., width] of each layer for the tokens with embeddings ``hidden``; () if none.

    It is the mean, times the root of 2, of a normed matmul of the embedding and of the token's row in a second table.
    ``image_rows``: see contract.decoder.
    """
    inputs = spec.variants.inputs
    if inputs is None:
        return ()
    if image_rows is not None:
        is_image, shape = b.op("Greater", image_rows, b.constant(0)), token_ids.shape
        token_ids = b.op("Where", is_image, b.constant(inputs.image_row), token_ids)
        token_ids.shape = shape  # a name of the padded dimension is lost
    width = spec.layers * inputs.width
    table = w.stored("model.embed_tokens_per_layer.weight", (inputs.vocab, width))
    stored = b.cast(b.op("Gather", table, token_ids), w.dtype)
    stored = b.op("Mul", stored, b.constant(inputs.width**0.5, w.dtype))
    projected = Linear.stored("model.per_layer_model_projection", width)(b, hidden, w)
    projected = b.op("Mul", projected, b.constant(spec.hidden**-0.5, w.dtype))
    same = [0] * len(dims_of(token_ids))  # dimensions that a Reshape keeps
    projected = b.op("Reshape", projected, b.constant([*same, spec.layers, inputs.width]))
    projected = stored_norm(b, projected, w, "model.per_layer_projection_norm", spec)
    projected = b.op("Reshape", projected, b.constant([*same, width]))
    projected.shape = stored.shape  # a Reshape loses the name of padded tokens
    both = b.op("Mul", b.op("Add", projected, stored), b.constant(2**-0.5, w.dtype))
    return b.ops("Split", both, b.constant([inputs.width] * spec.layers), outputs=spec.layers, axis=-1)


def with_own_input(
    b: GraphBuilder, stream: ir.Value, own: ir.Value | None, w: Weights, spec: ModelSpec, name: str
) -> ir.Value:
    """Return the stream after a layer called ``name``: plus what its ``own`` input adds, times the layer's factor."""
    if own is not None:
        gate = Linear.stored(f"{name}.per_layer_input_gate", width_of(own))(b, stream, w)
        update = Linear.stored(f"{name}.per_layer_projection", spec.hidden)(
            b, activate(b, gate, own, spec.activation), w
        )
        stream = b.op("Add", stream, stored_norm(b, update, w, f"{name}.post_per_layer_input_norm", spec))
    if not spec.variants.scaled:
        return stream
    return b.op("Mul", stream, w(f"{name}.layer_scalar", (1,)))
