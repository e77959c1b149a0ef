"""The parts of a decoder layer that differ between families: norms, scales, experts."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu2"]
GateUp = Literal["separate", "interleaved", "halves"]


@dataclass(frozen=True)
class NormNames:
    """The checkpoint's names of a layer's RMS norms; None: the layer has no such norm.

    ``after_attention`` and ``after_mlp`` norm the output of attention and MLP before the residual addition.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class QKNorm:
    """The checkpoint's names of the RMS norms of queries and keys.

    ``over_all_heads``: the norm covers all heads together, else each head separately. ``after_rotary``: the norm comes
    after the rotary embedding, else before it.
    """

    query: str = "q_norm"
    key: str = "k_norm"
    over_all_heads: bool = False
    after_rotary: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(``alpha`` * gate), with gate clamped to at most ``limit`` and up to -limit..limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: the router picks ``per_token`` of ``count`` experts for each token.

    ``intermediate``: the width of one expert. ``normalized``: the weights of the picked experts sum to 1, else the
    weights of all experts do. ``layers``: for each layer, whether it has experts. ``biased``: router and experts add
    biases. ``gate_up``: "separate" matmuls of experts that are stored one by one, or one matmul whose outputs are
    "interleaved" or two "halves", where one tensor stores all experts. ``clamped`` replaces the activation.
    """

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    layers: tuple[bool, ...]
    biased: bool = False
    gate_up: GateUp = "separate"
    clamped: ClampedSwiglu | None = None


@dataclass(frozen=True)
class Scales:
    """Constant factors and softcaps of a model.

    ``attention`` multiplies attention scores, ``embedding`` the looked-up embeddings, and ``residual`` the values that
    attention and MLP add to the residual stream. ``logits`` divides the logits. A softcap c replaces x by
    c * tanh(x / c) before masking; 0: no softcap.
    """

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
