"""The rows that get logits, picked from all rows of a call."""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, width_of


def gather_rows(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x[i, rows[i, j]]: [batch, query, width] and int64[batch, rows] to [batch, rows, width]."""
    return b.op("GatherND", x, b.op("Unsqueeze", rows, b.constant([2])), batch_dims=1)


def gather_row_elements(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """The same as ``gather_rows``, for a graph that is captured.

    onnxruntime's GatherND copies a temporary of the host to the device, which a replayed graph would read again.
    """
    index = b.op("Expand", b.op("Unsqueeze", rows, b.constant([2])), b.constant([1, 1, width_of(x)]))
    return b.op("GatherElements", x, index, axis=1)
