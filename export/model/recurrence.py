"""Parts that recurrent layers share on a CPU over a linear cache (docs/operators.md: linear_attention).

onnxruntime's operators process tokens one after the other, so a token has the same bits in any call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import normed
from tandemrt.export.model.recent_tokens import RecentTokens, cut_tokens
from tandemrt.export.model.row_padding import cut, is_padded
from tandemrt.export.read.recurrent_layers import DeltaNet, KimiDelta, Mamba2, RecurrentLayers
from tandemrt.export.read.spec import ModelSpec

_L2_EPSILON = 1e-6  # of the norm of queries and keys; the models' configs do not have it


@dataclass(frozen=True)
class Recurrence:
    """A linear recurrence: queries, keys and values of a span, [batch, span, heads * …].

    ``decay`` is the logarithm by which each head of the state is multiplied, or each key channel of a head. ``update``:
    the rate of the delta rule; None: S = exp(decay) * S + k ⊗ v. ``state``: the shape of a slot's state.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    decay: ir.Value
    update: ir.Value | None
    state: tuple[int, ...]

    def part(self, b: GraphBuilder, *, start: ir.Value | None = None, end: ir.Value | None = None) -> "Recurrence":
        """Return the tokens from ``start`` up to ``end``."""

        def of(x: ir.Value) -> ir.Value:
            return cut_tokens(b, x, start=start, end=end)

        update = None if self.update is None else of(self.update)
        return Recurrence(of(self.query), of(self.key), of(self.value), of(self.decay), update, self.state)

    def masked(self, b: GraphBuilder, mask: ir.Value, dtype: str) -> "Recurrence":
        """Return the recurrence in which tokens outside of ``mask`` leave the state as it is."""

        def zeroed(x: ir.Value) -> ir.Value:
            return b.op("Where", mask, x, b.constant(0, dtype))

        decay = zeroed(self.decay)
        if self.update is None:
            return Recurrence(self.query, self.key, zeroed(self.value), decay, None, self.state)
        return Recurrence(self.query, self.key, self.value, decay, zeroed(self.update), self.state)

    def run(self, b: GraphBuilder, state: ir.Value, dtype: str) -> tuple[ir.Value, ir.Value]:
        """Append the recurrence; return all outputs [batch, span, heads * value_dim] and the state after it."""
        heads, _, value_dim = self.state
        out, state = b.custom(
            "LinearAttention",
            self.query,
            self.key,
            self.value,
            state,
            self.decay,
            *([] if self.update is None else [self.update]),
            domain=LIBRARY,
            outputs=[(dtype, ("batch", _fresh_symbol(b), heads * value_dim)), ("float32", ("batch", *self.state))],
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated" if self.update is None else "gated_delta",
            scale=1.0,
        )
        return out, state


@dataclass(frozen=True)
class Held:
    """What a layer keeps per slot: the inputs of recent tokens [batch, history, width], and perhaps a state."""

    recent: ir.Value
    state: ir.Value | None = None


@dataclass(frozen=True)
class RecurrentCall:
    """A call of the recurrent layers of a graph. ``ids``: the token ids of the call."""

    spec: ModelSpec
    ids: ir.Value
    tokens: RecentTokens

    @classmethod
    def over_slots(
        cls, b: GraphBuilder, spec: ModelSpec, net: RecurrentLayers, graph_inputs: Mapping[str, ir.Value]
    ) -> "RecurrentCall":
        """Append the nodes that all layers share."""
        history = next(int(dims_of(v)[1]) for name, v in graph_inputs.items() if name.startswith("past_recent."))
        return cls(
            spec,
            graph_inputs["token_ids"],
            RecentTokens.of(b, graph_inputs, history=history, kernel=net.kernel),
        )

    def matmul(self, b: GraphBuilder, x: ir.Value, w: Weights, linear: Linear) -> ir.Value:
        """Return the product for the call's tokens, without padding."""
        projected = linear(b, x, w)
        return cut(b, projected, self.tokens.count, self.ids) if is_padded(x) else projected

    def earlier(self, b: GraphBuilder, recent: ir.Value, dtype: str) -> tuple[ir.Value, ir.Value]:
        """Return the entries of ``recent`` by position, and the tokens before the call's that it reads.

        These are the ``kernel`` - 1 tokens before the replayed ones, and the replayed ones.
        """
        ordered = self.tokens.read(b, recent)
        return ordered, self.tokens.zero_absent(b, ordered, dtype)

    def span(
        self, b: GraphBuilder, earlier: ir.Value, mixed: ir.Value, net: DeltaNet | KimiDelta | Mamba2
    ) -> tuple[ir.Value, ir.Value]:
        """Return the replayed tokens and ``mixed``, those of the call, and the convolved channels of the tokens before.

        ``earlier``: see the method of this name.
        """
        before = net.kernel - 1
        lead = b.op("Slice", earlier, b.constant([0, 0]), b.constant([before, net.channels]), b.constant([1, 2]))
        return b.op("Concat", cut_tokens(b, earlier, start=b.constant([before])), mixed, axis=1), lead

    def run(self, b: GraphBuilder, span: Recurrence, state: ir.Value, dtype: str) -> tuple[ir.Value, ir.Value]:
        """Append a recurrence over a span; return the outputs of the call's tokens and the committed state."""
        tokens, final = self.tokens, self.tokens.committed_end
        committed, state = span.part(b, end=final).masked(b, tokens.committed, dtype).run(b, state, dtype)
        rest = span.part(b, start=tokens.open_start).masked(b, tokens.left_open, dtype)
        left_open, _ = rest.run(b, state, dtype)
        later = cut_tokens(b, left_open, start=b.op("Sub", final, tokens.open_start))
        return b.op("Concat", cut_tokens(b, committed, start=tokens.replayed), later, axis=1), state


def convolved(
    b: GraphBuilder,
    x: ir.Value,
    before: ir.Value,
    w: Weights,
    names: Sequence[str],
    widths: Sequence[int],
    *,
    kernel: int,
    bias: bool = False,
    activation: Literal["silu", "none"] = "none",
) -> ir.Value:
    """Return ``convolved_by`` the weights called ``names``, for ``widths`` channels each."""
    weight = w.stacked([f"{name}.weight" for name in names], widths, (1, kernel))
    biases = w.stacked([f"{name}.bias" for name in names], widths) if bias else None
    return convolved_by(b, x, before, weight, w.dtype, bias=biases, activation=activation)


def convolved_by(
    b: GraphBuilder,
    x: ir.Value,
    before: ir.Value,
    weight: ir.Value,
    dtype: str,
    *,
    bias: ir.Value | None = None,
    activation: Literal["silu", "none"],
) -> ir.Value:
    """Return the causal convolution of each channel of ``x`` [batch, tokens, channels] by ``weight``.

    ``weight`` [channels, 1, kernel]. ``before`` [batch, kernel - 1, channels] are the tokens before.
    """
    channels, _, kernel = map(int, dims_of(weight))
    out, _ = b.custom(
        "CausalConvWithState",
        x,
        weight,
        bias,
        before,
        domain=LIBRARY,
        outputs=[(dtype, ("batch", "span", channels)), (dtype, ("batch", kernel - 1, channels))],
        activation=activation,
        channels_last=1,
    )
    return out


def for_each_head(b: GraphBuilder, x: ir.Value, heads: int) -> ir.Value:
    """Return [batch, tokens, heads * size] from ``x`` [batch, tokens, groups, size]: a group serves adjacent heads."""
    groups, size = int(dims_of(x)[2]), width_of(x)
    if heads > groups:
        x = b.op("Expand", b.op("Unsqueeze", x, b.constant([3])), b.constant([1, 1, 1, heads // groups, 1]))
    return b.op("Reshape", x, b.constant([0, 0, heads * size]))


def unit_vectors(b: GraphBuilder, x: ir.Value, heads: int, dtype: str, power: float) -> ir.Value:
    """Return unit vectors of each head times size ** (0.5 - ``power``), [batch, tokens, heads, size].

    x / sqrt(|x|² + epsilon) is an RMS norm with another epsilon, divided by the root of the size.
    """
    size = width_of(x) // heads
    headed = b.op("Reshape", x, b.constant([0, 0, heads, size]))
    return normed(b, headed, b.constant([size**-power] * size, dtype), dtype, _L2_EPSILON / size)


def silu(b: GraphBuilder, x: ir.Value) -> ir.Value:
    return b.op("Mul", x, b.op("Sigmoid", x))


def _fresh_symbol(b: GraphBuilder) -> str:
    """Return a symbol for a dimension of its own: onnxruntime plans memory by the names."""
    return f"span_{len(b.nodes)}"
