"""The tokens that a call of recurrent layers reads and keeps: those of its own, and recent ones from a ring."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder


@dataclass(frozen=True)
class RecentTokens:
    """Indices, shared by all layers, of a call's tokens and of those before it that it reads.

    A call reads ``replayed`` tokens before its own, at least 1: those since the states of its rows, the longest of
    them. The convolution also reads the ``kernel`` - 1 tokens before these. A *span* is the replayed tokens, followed
    by the call's own.

    Attributes:
        count: [1], the call's tokens.
        order: [batch, history, 1], the entries of ``recent`` by position, up to the call's first token.
        before: [1], where the tokens that the convolution reads begin in that order.
        exist: bool [batch, kernel - 1 + replayed, 1], whether the text has these tokens.
        replayed: [1].
        committed_end: [1], the end in a span of the tokens that any row makes final.
        committed: bool [batch, committed_end, 1], the tokens that this call adds to a row's state.
        open_start: [1], the start in a span of the tokens that any row leaves open.
        left_open: bool [batch, from open_start on, 1], the tokens after those of the row's state.
        stored_from: [1], the first of the call's tokens that may be kept in ``recent``.
        stored: [batch, history, 1], for each entry of ``recent`` its token, among all entries in ``order`` followed by
            the call's tokens from ``stored_from`` on.
    """

    count: ir.Value
    order: ir.Value
    before: ir.Value
    exist: ir.Value
    replayed: ir.Value
    committed_end: ir.Value
    committed: ir.Value
    open_start: ir.Value
    left_open: ir.Value
    stored_from: ir.Value
    stored: ir.Value

    @classmethod
    def of(cls, b: GraphBuilder, graph_inputs: Mapping[str, ir.Value], *, history: int, kernel: int) -> "RecentTokens":
        """Append the nodes that all layers share."""
        one, size = b.constant([1]), b.constant([history])
        index, covered, commit = (
            b.op("Unsqueeze", graph_inputs[name], one) for name in ("write_index", "state_index", "commit_index")
        )
        tokens = b.op("Shape", graph_inputs["token_ids"], start=1, end=2)
        entries = b.constant(list(range(history)))
        replayed = _clipped(b, _over_rows(b, "ReduceMax", b.op("Sub", index, covered)), one, history - (kernel - 1))
        before = b.op("Sub", b.constant([history - (kernel - 1)]), replayed)
        positions = b.op("Add", index, _range(b, b.op("Neg", replayed), tokens))
        first = b.op("Add", b.op("Neg", replayed), b.constant([1 - kernel]))
        ahead = b.op("Sub", commit, index)
        committed_end = b.op("Add", replayed, _clipped(b, _over_rows(b, "ReduceMax", ahead), b.constant([0]), tokens))
        last = b.op("Sub", tokens, one)
        open_start = b.op("Add", replayed, _clipped(b, _over_rows(b, "ReduceMin", ahead), b.op("Neg", replayed), last))
        final = b.op("And", b.op("GreaterOrEqual", positions, covered), b.op("Less", positions, commit))
        kept = b.op("Min", tokens, size)
        newest = b.op("Sub", b.op("Add", index, tokens), one)
        age = b.op("Mod", b.op("Sub", newest, entries), size)
        return cls(
            count=tokens,
            order=_last_axis(b, b.op("Mod", b.op("Add", index, entries), size)),
            before=before,
            exist=_last_axis(
                b, b.op("GreaterOrEqual", b.op("Add", index, _range(b, first, b.constant([0]))), b.constant(0))
            ),
            replayed=replayed,
            committed_end=committed_end,
            committed=_last_axis(b, cut_tokens(b, final, end=committed_end)),
            open_start=open_start,
            left_open=_last_axis(b, cut_tokens(b, b.op("GreaterOrEqual", positions, commit), start=open_start)),
            stored_from=b.op("Sub", tokens, kept),
            stored=_last_axis(b, b.op("Sub", b.op("Sub", b.op("Add", size, kept), one), age)),
        )

    def read(self, b: GraphBuilder, recent: ir.Value) -> ir.Value:
        """Return the entries of ``recent`` [batch, history, width] in the order of their positions."""
        return b.op("GatherND", recent, self.order, batch_dims=1)

    def zero_absent(self, b: GraphBuilder, ordered: ir.Value, dtype: str) -> ir.Value:
        """Return the tokens of ``ordered`` that the call reads, with zeros before the beginning of a text."""
        return b.op("Where", self.exist, cut_tokens(b, ordered, start=self.before), b.constant(0, dtype))

    def store(self, b: GraphBuilder, ordered: ir.Value, new: ir.Value) -> ir.Value:
        """Return ``recent`` with the call's tokens ``new`` [batch, tokens, width]."""
        both = b.op("Concat", ordered, cut_tokens(b, new, start=self.stored_from), axis=1)
        return b.op("GatherND", both, self.stored, batch_dims=1)


def _range(b: GraphBuilder, start: ir.Value, end: ir.Value) -> ir.Value:
    """Return start, start + 1, … below end, int64 [1, end - start]."""
    axis = b.constant([0])
    steps = b.op("Range", b.op("Squeeze", start, axis), b.op("Squeeze", end, axis), b.constant(1))
    return b.op("Unsqueeze", steps, axis)


def cut_tokens(b: GraphBuilder, x: ir.Value, *, start: ir.Value | None = None, end: ir.Value | None = None) -> ir.Value:
    """Return the tokens of ``x`` [batch, tokens, …] from ``start`` up to ``end``."""
    first = b.constant([0]) if start is None else start
    return b.op("Slice", x, first, b.constant([2**62]) if end is None else end, b.constant([1]))


def _over_rows(b: GraphBuilder, reduction: str, x: ir.Value) -> ir.Value:
    """Reduce [batch, 1] to [1]."""
    return b.op(reduction, x, b.constant([0]), keepdims=0)


def _clipped(b: GraphBuilder, x: ir.Value, least: ir.Value, most: ir.Value | int) -> ir.Value:
    most = b.constant([most]) if isinstance(most, int) else most
    return b.op("Min", b.op("Max", x, least), most)


def _last_axis(b: GraphBuilder, x: ir.Value) -> ir.Value:
    return b.op("Unsqueeze", x, b.constant([2]))
