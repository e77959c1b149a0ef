"""What the layers of a decoder are made of, where families differ: norms, scales, experts."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu2"]


@dataclass(frozen=True)
class BlockNorms:
    """The RMS norms of a layer by their names in the checkpoint; None where there is none.

    Those behind attention and MLP norm what these give, before it is added to the stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class QKNorm:
    """The RMS norms of queries and keys, by name: over each head by itself, or over all heads at once."""

    query: str = "q_norm"
    key: str = "k_norm"
    over_all_heads: bool = False
    after_rotary: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(``alpha`` * gate), of a gate of at most ``limit`` and an up within -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture in place of the MLP, in the ``layers`` that say so: each token chooses ``per_token`` of ``count``.

    ``intermediate`` is the width of each. ``normalized``: the weights of the chosen ones sum to 1, else all weights do.
    ``biased``: router and experts add biases. ``joined``: gate and up are one product, which gives a value of each in
    turns, and a tensor holds all experts. ``clamped`` takes the place of the activation.
    """

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    layers: tuple[bool, ...]
    biased: bool = False
    joined: bool = False
    clamped: ClampedSwiglu | None = None


@dataclass(frozen=True)
class Scales:
    """What multiplies, and what bounds.

    ``attention`` multiplies scores, ``embedding`` what is looked up, ``residual`` what a layer adds to the stream;
    ``logits`` divides. A softcap c makes x of c * tanh(x / c), before anything is masked; 0: none.
    """

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
