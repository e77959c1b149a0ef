"""States of images in a decoder: in place of the embeddings of their tokens, and added after the first layers."""

from collections.abc import Mapping

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.read.spec import ModelSpec


def with_images(
    b: GraphBuilder, embeddings: ir.Value, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value]
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """Return the stream [batch, query, hidden] of a call, and what its first layers add, which is 0 for text.

    DeepStack (Meng et al., 2024) adds states of earlier layers of the tower after the first layers of the decoder.
    """
    if not spec.image_levels:
        return embeddings, ()
    rows = graph_inputs["image_rows"]
    states = b.op("Gather", graph_inputs["image_states"], rows)
    sizes = b.constant([spec.hidden] * spec.image_levels)
    first, *updates = b.ops("Split", states, sizes, outputs=spec.image_levels, axis=-1)
    is_image = b.op("Unsqueeze", b.op("Greater", rows, b.constant(0)), b.constant([-1]))
    stream = b.op("Where", is_image, first, embeddings)
    stream.shape = embeddings.shape  # a name of the padded dimension is lost above
    return stream, tuple(updates)
