"""The gated delta net on a CPU over a linear cache: ``gated_delta_net`` (docs/operators.md) by onnxruntime's operators.

The operators process tokens one after the other, so a token has the same bits in any call.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.norm import normed
from tandemrt.export.model.row_padding import cut, is_padded, pad_as
from tandemrt.export.read.layer import DeltaNet
from tandemrt.export.read.spec import ModelSpec

_L2_EPSILON = 1e-6  # of the norm of queries and keys; the models' configs do not have it


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
            committed=_last_axis(b, _slice(b, final, end=committed_end)),
            open_start=open_start,
            left_open=_last_axis(b, _slice(b, b.op("GreaterOrEqual", positions, commit), start=open_start)),
            stored_from=b.op("Sub", tokens, kept),
            stored=_last_axis(b, b.op("Sub", b.op("Sub", b.op("Add", size, kept), one), age)),
        )

    def read(self, b: GraphBuilder, recent: ir.Value) -> ir.Value:
        """Return the entries of ``recent`` [batch, history, width] in the order of their positions."""
        return b.op("GatherND", recent, self.order, batch_dims=1)

    def zero_absent(self, b: GraphBuilder, ordered: ir.Value, dtype: str) -> ir.Value:
        """Return the tokens of ``ordered`` that the call reads, with zeros before the beginning of a text."""
        return b.op("Where", self.exist, _slice(b, ordered, start=self.before), b.constant(0, dtype))

    def store(self, b: GraphBuilder, ordered: ir.Value, new: ir.Value) -> ir.Value:
        """Return ``recent`` with the call's tokens ``new`` [batch, tokens, width]."""
        both = b.op("Concat", ordered, _slice(b, new, start=self.stored_from), axis=1)
        return b.op("GatherND", both, self.stored, batch_dims=1)


@dataclass(frozen=True)
class _Span:
    """The inputs of the recurrence, [batch, span, …]: queries, keys and values by value head, decay and update."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    decay: ir.Value
    update: ir.Value

    def part(self, b: GraphBuilder, *, start: ir.Value | None = None, end: ir.Value | None = None) -> "_Span":
        """Return the tokens from ``start`` up to ``end``."""
        values = (self.query, self.key, self.value, self.decay, self.update)
        return _Span(*(_slice(b, each, start=start, end=end) for each in values))


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta nets of a graph. ``ids``: the token ids of the call."""

    spec: ModelSpec
    net: DeltaNet
    ids: ir.Value
    tokens: RecentTokens

    @classmethod
    def over_slots(cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value]) -> "GatedDeltaNet":
        """Append the nodes that all layers share."""
        assert spec.recurrent is not None
        history = next(int(dims_of(v)[1]) for name, v in graph_inputs.items() if name.startswith("past_recent."))
        tokens = RecentTokens.of(b, graph_inputs, history=history, kernel=spec.recurrent.kernel)
        return cls(spec, spec.recurrent, graph_inputs["token_ids"], tokens)

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, name: str, state: ir.Value, recent: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return [batch, tokens, value_heads * value_dim] for ``x`` [batch, tokens, hidden], state and recent tokens.

        ``name`` is the prefix of the layer's weights. ``state`` and ``recent`` have the shapes of the contract.
        """
        net = self.net
        mixed, gate = self._projected(b, x, w, name)
        ordered = self.tokens.read(b, recent)
        span = self._span(b, mixed, self.tokens.zero_absent(b, ordered, w.dtype), w, name)
        tokens, final = self.tokens, self.tokens.committed_end
        committed, state = self._recur(b, span.part(b, end=final), tokens.committed, state, w.dtype)
        left_open, _ = self._recur(b, span.part(b, start=tokens.open_start), tokens.left_open, state, w.dtype)
        rest = _slice(b, left_open, start=b.op("Sub", final, tokens.open_start))
        out = b.op("Concat", _slice(b, committed, start=tokens.replayed), rest, axis=1)
        headed = b.op("Reshape", out, b.constant([0, 0, net.value_heads, net.value_dim]))
        scaled = normed(b, headed, w(f"{name}.norm.weight", (net.value_dim,)), w.dtype, self.spec.norm_eps)
        flat = b.op("Reshape", scaled, b.constant([0, 0, net.value_heads * net.value_dim]))
        gated = b.op("Mul", flat, b.op("Mul", gate, b.op("Sigmoid", gate)))
        gated.shape = ir.Shape((*dims_of(self.ids), net.value_heads * net.value_dim))
        if is_padded(x):
            gated = pad_as(b, gated, self.tokens.count, x)
        return gated, state, self.tokens.store(b, ordered, mixed)

    def _projected(self, b: GraphBuilder, x: ir.Value, w: Weights, name: str) -> tuple[ir.Value, ir.Value]:
        """Return the inputs of each token, [batch, tokens, width], and its output gate."""
        net = self.net
        values = net.value_heads * net.value_dim
        if net.by_key_head:
            qkvz = self._matmul(b, x, w, Linear.stored(f"{name}.in_proj_qkvz", net.channels + values))
            gates = self._matmul(b, x, w, Linear.stored(f"{name}.in_proj_ba", 2 * net.value_heads))
            shared = net.value_heads // net.key_heads
            *qkv, gate = self._by_kind(b, qkvz, [net.key_dim, net.key_dim, *[shared * net.value_dim] * 2])
            update, decay = self._by_kind(b, gates, [shared] * 2)
            return b.op("Concat", *qkv, decay, update, axis=2), gate
        # In the order of their names, in which they are adjacent in the file.
        widths = {"a": net.value_heads, "b": net.value_heads, "qkv": net.channels, "z": values}
        merged = merge_linears(*(Linear.stored(f"{name}.in_proj_{part}", width) for part, width in widths.items()))
        projected = self._matmul(b, x, w, merged)
        decay, update, mixed, gate = b.ops("Split", projected, b.constant(list(widths.values())), outputs=4, axis=2)
        return b.op("Concat", mixed, decay, update, axis=2), gate

    def _matmul(self, b: GraphBuilder, x: ir.Value, w: Weights, linear: Linear) -> ir.Value:
        """Return the product for the call's tokens, without padding."""
        projected = linear(b, x, w)
        return cut(b, projected, self.tokens.count, self.ids) if is_padded(x) else projected

    def _by_kind(self, b: GraphBuilder, x: ir.Value, widths: list[int]) -> tuple[ir.Value, ...]:
        """Split ``x``, which has ``widths`` values of each kind per key head, into all values of each kind."""
        heads = self.net.key_heads
        headed = b.op("Reshape", x, b.constant([0, 0, heads, sum(widths)]))
        parts = b.ops("Split", headed, b.constant(widths), outputs=len(widths), axis=3)
        return tuple(
            b.op("Reshape", part, b.constant([0, 0, heads * width])) for part, width in zip(parts, widths, strict=True)
        )

    def _span(self, b: GraphBuilder, mixed: ir.Value, earlier: ir.Value, w: Weights, name: str) -> _Span:
        """Return the inputs of the recurrence; ``earlier`` are the tokens before the ``mixed`` ones of the call."""
        net, lead = self.net, b.constant([self.net.kernel - 1])
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        span = b.op("Concat", _slice(b, earlier, start=lead), mixed, axis=1)
        qkv, decay, update = b.ops(
            "Split", span, b.constant([net.channels, net.value_heads, net.value_heads]), outputs=3, axis=2
        )
        first = _slice(
            b, b.op("Slice", earlier, b.constant([0]), b.constant([net.channels]), b.constant([2])), end=lead
        )
        mixed_qkv, _ = b.custom(
            "CausalConvWithState",
            *(qkv, w(f"{name}.conv1d.weight", (net.channels, 1, net.kernel)), None, first),
            domain=LIBRARY,
            outputs=[(w.dtype, ("batch", "span", net.channels)), (w.dtype, ("batch", net.kernel - 1, net.channels))],
            activation="silu",
            channels_last=1,
        )
        query, key, value = b.ops("Split", mixed_qkv, b.constant([keys, keys, values]), outputs=3, axis=2)
        query, key = (self._unit(b, each, w.dtype, power) for each, power in ((query, 1.0), (key, 0.5)))
        scale = b.op("Neg", b.op("Exp", b.cast(w.stored(f"{name}.A_log", (net.value_heads,)), "float32")))
        bias = b.cast(w.stored(f"{name}.dt_bias", (net.value_heads,)), "float32")
        gates = (w.dtype, ("batch", "span", net.value_heads))
        decay, update = b.custom(
            "LinearAttentionGate", decay, bias, scale, update, domain=LIBRARY, outputs=[gates, gates]
        )
        return _Span(query, key, value, decay, update)

    def _unit(self, b: GraphBuilder, x: ir.Value, dtype: str, power: float) -> ir.Value:
        """Return unit vectors of each key head times key_dim ** (0.5 - ``power``), for every value head.

        x / sqrt(|x|² + epsilon) is an RMS norm with another epsilon, divided by the root of the size.
        """
        net = self.net
        headed = b.op("Reshape", x, b.constant([0, 0, net.key_heads, net.key_dim]))
        weight = b.constant([net.key_dim**-power] * net.key_dim, dtype)
        unit = normed(b, headed, weight, dtype, _L2_EPSILON / net.key_dim)
        if net.value_heads > net.key_heads:
            each = b.op("Unsqueeze", unit, b.constant([3]))
            unit = b.op("Expand", each, b.constant([1, 1, 1, net.value_heads // net.key_heads, 1]))
        return b.op("Reshape", unit, b.constant([0, 0, net.value_heads * net.key_dim]))

    def _recur(
        self, b: GraphBuilder, span: _Span, mask: ir.Value, state: ir.Value, dtype: str
    ) -> tuple[ir.Value, ir.Value]:
        """Append the recurrence over the tokens in ``mask``; return all outputs and the state after it.

        Decay and update of the other tokens become 0, which leaves a state as it is.
        """
        gates = (b.op("Where", mask, gate, b.constant(0, dtype)) for gate in (span.decay, span.update))
        net = self.net
        out, state = b.custom(
            "LinearAttention",
            *(span.query, span.key, span.value, state, *gates),
            domain=LIBRARY,
            outputs=[
                (dtype, ("batch", _fresh_symbol(b), net.value_heads * net.value_dim)),
                ("float32", ("batch", *net.state)),
            ],
            q_num_heads=net.value_heads,
            kv_num_heads=net.value_heads,
            update_rule="gated_delta",
            scale=1.0,
        )
        return out, state


def _fresh_symbol(b: GraphBuilder) -> str:
    """Return a symbol for a dimension of its own: onnxruntime plans memory by the names."""
    return f"span_{len(b.nodes)}"


def _range(b: GraphBuilder, start: ir.Value, end: ir.Value) -> ir.Value:
    """Return start, start + 1, … below end, int64 [1, end - start]."""
    axis = b.constant([0])
    steps = b.op("Range", b.op("Squeeze", start, axis), b.op("Squeeze", end, axis), b.constant(1))
    return b.op("Unsqueeze", steps, axis)


def _slice(b: GraphBuilder, x: ir.Value, *, start: ir.Value | None = None, end: ir.Value | None = None) -> ir.Value:
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
