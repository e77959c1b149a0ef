"""The rows that get logits, picked from all rows of a call."""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder


def gather_rows(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x[i, rows[i, j]]: [batch, query, width] and int64[batch, rows] to [batch, rows, width]."""
    return b.op("GatherND", x, b.op("Unsqueeze", rows, b.constant([2])), batch_dims=1)


def gather_tokens(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x[rows[i, j]]: [tokens, width] and int64[batch, rows] to [batch, rows, width]."""
    return b.op("Gather", x, rows, axis=0)
