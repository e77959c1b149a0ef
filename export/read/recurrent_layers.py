"""The kinds of recurrent layers: what a token and a slot hold, and how the checkpoint stores the weights.

export/model/recurrent.py has the function in the graph of each kind.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class ShortConvolution:
    """Layers with a gated causal convolution in place of attention (LFM2).

    ``layers``: for each layer, whether it has one. ``kernel``: the tokens that the convolution reads, its own included.
    ``bias``: the convolution and both matmuls add biases.
    """

    module: ClassVar[str] = "conv"
    state: ClassVar[tuple[int, ...]] = ()
    with_attention: ClassVar[bool] = False

    layers: tuple[bool, ...]
    kernel: int
    channels: int
    bias: bool

    @property
    def width(self) -> int:
        """Inputs of a token that later tokens read."""
        return self.channels

    @property
    def mixed(self) -> int:
        """Outputs of a token."""
        return self.channels


@dataclass(frozen=True)
class DeltaNet:
    """Layers with a gated delta net in place of attention; see ``linear_attention`` in docs/operators.md.

    ``layers``: for each layer, whether it has one. ``kernel``: the tokens that the convolution reads, its own included.
    Each key head serves the same number of consecutive value heads. ``projections``: four weights project the input,
    one per kind of output; or two, whose outputs are ordered by key head (Qwen3-Next); or queries, keys and values have
    a weight each (OLMo Hybrid). ``update_scale`` multiplies the rate of the delta rule. ``norm_eps``: of the norm of
    the output; None: that of the model.
    """

    module: ClassVar[str] = "linear_attn"
    bias: ClassVar[bool] = False
    with_attention: ClassVar[bool] = False

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    projections: Literal["by kind", "by key head", "separate"] = "by kind"
    update_scale: float = 1.0
    norm_eps: float | None = None

    @property
    def channels(self) -> int:
        """Values of a token that the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Inputs of a token: those of the convolution, and the logits of decay and update of each value head."""
        return self.channels + 2 * self.value_heads

    @property
    def mixed(self) -> int:
        """Outputs of a token."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a slot's state."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class KimiDelta:
    """Layers with Kimi delta attention (Kimi Linear, 2025): the gated delta rule, with a decay per key channel.

    ``layers``: for each layer, whether it has it. ``kernel``: the tokens that the convolutions read, their own
    included. Queries, keys and values have ``head_dim`` values in each head. Decay and output gate are matmuls of a
    vector of ``head_dim`` values.
    """

    module: ClassVar[str] = "linear_attn"
    bias: ClassVar[bool] = False
    with_attention: ClassVar[bool] = False

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    kernel: int

    @property
    def mixed(self) -> int:
        """Outputs of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values of a token that the convolutions read: queries, keys and values."""
        return 3 * self.mixed

    @property
    def width(self) -> int:
        """Inputs of a token: those of the convolutions, the logits of each decay, and those of each head's update."""
        return self.channels + self.mixed + self.heads

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a slot's state."""
        return self.heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class NormOverRanks:
    """The norm of the outputs of rank ``rank`` of ``ranks``: in ``groups`` of the outputs of all ranks."""

    rank: int
    ranks: int
    groups: int


@dataclass(frozen=True)
class Mamba2:
    """Layers with a Mamba-2 state space model (Dao and Gu, 2024) in place of attention.

    ``layers``: for each layer, whether it has one. ``kernel``: the tokens that the convolution reads, its own included.
    Keys and queries (B and C in the paper) have ``state_dim`` values in each of ``groups``; a group serves the same
    number of consecutive heads. ``bias``: of both matmuls. ``norm``: the place of the norm of the output, whose groups
    are those of the keys; None: there is no norm. ``with_attention``: the layer also has attention, which reads the
    same input, and their outputs are added (Falcon-H1). ``scales`` multiply the input, the outputs of the first matmul
    (gate, values, keys, queries, step size), and the output. ``norm_over_ranks``: of a part whose group of the norm is
    on several ranks.
    """

    module: ClassVar[str] = "mamba"

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    conv_bias: bool
    bias: bool = False
    norm: Literal["after the gate", "before the gate"] | None = "after the gate"
    with_attention: bool = False
    scales: tuple[float, tuple[float, float, float, float, float], float] = (1.0, (1.0,) * 5, 1.0)
    norm_over_ranks: NormOverRanks | None = None

    @property
    def mixed(self) -> int:
        """Outputs of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values of a token that the convolution reads: values, keys and queries."""
        return self.mixed + 2 * self.groups * self.state_dim

    @property
    def width(self) -> int:
        """Inputs of a token: those of the convolution, and the logit of each head's step size."""
        return self.channels + self.heads

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a slot's state."""
        return self.heads, self.state_dim, self.head_dim


RecurrentLayers = ShortConvolution | DeltaNet | KimiDelta | Mamba2
