"""Selection of the rows that get logits."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder


def gather_rows(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return x[i, rows[i, j]]: [batch, rows, width] for [batch, query, width] and int64[batch, rows]."""
    return b.op("GatherND", x, b.op("Unsqueeze", rows, b.constant([2])), batch_dims=1)


def gather_tokens(b: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return x[rows[i, j]]: [batch, rows, width] for [tokens, width] and int64[batch, rows]."""
    return b.op("Gather", x, rows, axis=0)
