"""The parts of a decoder layer that differ between families: heads, norms, scales, experts, routers."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
GateUp = Literal["separate", "interleaved", "halves"]


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer: ``query`` of them, ``kv`` heads of keys and values, and ``dim`` values each."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class LayerInputs:
    """A second embedding table with a vector of ``width`` values for each token and layer; it has ``vocab`` rows.

    The vectors, plus a matmul of the first embedding, enter every layer after its MLP (Gemma 4). ``image_row``: of the
    tokens of images.
    """

    width: int
    vocab: int
    image_row: int


@dataclass(frozen=True)
class OutputGate:
    """A gate of the output of attention: ``function`` of one more matmul, with an output per head or ``per_value``."""

    per_value: bool = False
    function: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True)
class Variants:
    """How layers differ from those of other models; the defaults are the common layer.

    ``sources``: for each layer the one whose cache it reads, numbered after the model's own, because it is a layer of
    another model; (): see ``sharing``. ``heads``: for each layer its heads; None: all have those of the spec.
    ``values_are_keys``: layers without a sliding window have no weights for values, their values are the keys before
    their norm. ``value_norm``: values are normed without a weight. ``sharing``: the number of last layers without keys
    and values; each reads the cache of the last earlier layer of its kind, sliding or not, and its MLP has width
    ``sharing_intermediate``. ``scaled``: one stored factor multiplies the residual stream after each layer.
    ``value_dim``: a head of values has fewer values than one of keys, which are cached with zeros after them; 0: as
    many. ``value_scale`` multiplies them. ``sliding_sinks``: of the layers only those with a sliding window have
    attention sinks. ``gate`` multiplies the output of attention. ``expert_clamps``: for each layer what replaces the
    activation of its experts, and ``mlp_clamps`` that of its MLP or shared expert; None: nothing; (): nothing in any
    layer.
    """

    heads: tuple[Heads, ...] | None = None
    values_are_keys: bool = False
    value_norm: bool = False
    sources: tuple[int, ...] = ()
    sharing: int = 0
    sharing_intermediate: int = 0
    inputs: LayerInputs | None = None
    scaled: bool = False
    value_dim: int = 0
    value_scale: float = 1.0
    sliding_sinks: bool = False
    gate: OutputGate | None = None
    expert_clamps: tuple["ClampedSwiglu | None", ...] = ()
    mlp_clamps: tuple["ClampedSwiglu | None", ...] = ()


UNIFORM = Variants()


@dataclass(frozen=True)
class NormNames:
    """The checkpoint's names of a layer's RMS norms; None: the layer has no such norm.

    ``after_attention`` and ``after_mlp`` norm the output of attention and MLP before the residual addition.
    ``parallel``: the MLP reads the residual stream before attention, and what attention reads if it has no norm itself.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False


@dataclass(frozen=True)
class Skip:
    """``weight`` of the residual stream before layer ``source`` is mixed into the one before layer ``target``."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True)
class QKNorm:
    """The checkpoint's names of the RMS norms of queries and keys.

    ``over_all_heads``: the norm covers all heads together, else each head separately. ``after_rotary``: the norm comes
    after the rotary embedding, else before it. ``stored``: the norms have weights. ``only_rotated``: layers without
    rotary embedding have no norms. ``by_head``: each head has weights of its own, in rows of one tensor or in a tensor
    each.
    """

    query: str = "q_norm"
    key: str = "k_norm"
    over_all_heads: bool = False
    after_rotary: bool = False
    stored: bool = True
    only_rotated: bool = False
    by_head: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + ``offset``) * gate * sigmoid(``alpha`` * gate), with gate at most ``limit`` and up in -limit..limit.

    ``clamped_after``: the product gate * sigmoid(alpha * gate) is at most ``limit``, in place of gate (Step 3.5).
    """

    alpha: float
    limit: float
    offset: float = 1.0
    clamped_after: bool = False


@dataclass(frozen=True)
class Router:
    """How a router scores experts.

    ``scoring``: the function from logits to scores; "sparsemixer" chooses one expert after the other, each weighted by
    a softmax of the logits that are near enough to its own, by ``jitter`` (Phi-3.5-MoE). ``correction``: one stored
    value per expert is added to the scores for the choice, but not to the weights. Experts form ``groups`` of equal
    size, and only experts of the best ``chosen_groups`` groups are chosen; the score of a group is the sum of its
    ``best_of_group`` best scores. Normalized weights are divided by their sum plus ``added_sum``, but by no less
    than ``least_sum``. ``scale`` multiplies the weights.
    """

    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 2
    least_sum: float = 0.0
    added_sum: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True)
class ExpertNorms:
    """The checkpoint's names of the norms of experts that run in addition to an MLP of their own input (Gemma 4).

    ``before`` norms the residual stream for the experts, ``after`` their output, ``after_shared`` the MLP's. The router
    norms the residual stream with a weight of its own, and one stored factor per expert multiplies its weights.
    """

    before: str
    after: str
    after_shared: str


@dataclass(frozen=True)
class SharedExpert:
    """An MLP of width ``intermediate`` that every token runs in addition to its experts.

    ``name``: its name in the checkpoint. ``gate``: the name of a matmul to one value, whose sigmoid multiplies the
    output; None: there is none. ``averaged``: its output and that of the experts are averaged, not added.
    """

    intermediate: int
    name: str = "shared_experts"
    gate: str | None = None
    averaged: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: the router picks ``per_token`` of ``count`` experts for each token.

    ``intermediate``: the width of one expert. ``normalized``: the weights of the picked experts sum to 1 before the
    router scales them. ``layers``: for each layer, whether it has experts. ``biased``: router and experts add biases.
    ``gate_up``: "separate" matmuls, or one matmul whose outputs are "interleaved" or two "halves", where one tensor
    stores all experts. ``clamped`` replaces the activation. ``norms``: None: the experts read what the MLP would read.
    ``weighted_input``: the weight of an expert multiplies its input, not its output. ``latent``: one matmul gives all
    experts inputs of so many values, and another takes their sum back to the hidden size; 0: they read and write the
    hidden size (Nemotron 3 Super). ``output_norm``: the checkpoint's name of the norm of their output, of layers with
    experts alone; None: that of all layers.
    """

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    layers: tuple[bool, ...]
    biased: bool = False
    gate_up: GateUp = "separate"
    clamped: ClampedSwiglu | None = None
    router: Router = Router()
    shared: SharedExpert | None = None
    norms: ExpertNorms | None = None
    weighted_input: bool = False
    latent: int = 0
    output_norm: str | None = None


@dataclass(frozen=True)
class Scales:
    """Constant factors and softcaps of a model.

    ``attention`` multiplies attention scores, ``embedding`` the looked-up embeddings, and ``residual`` the values that
    attention and MLP add to the residual stream. ``logits`` divides the logits. A softcap c replaces x by
    c * tanh(x / c) before masking; 0: no softcap. ``attention_input`` and ``attention_output`` multiply the input and
    the output of attention, ``mlp_gate`` the gate of an MLP before its activation, and ``mlp_output`` the MLP's output.
    Queries at position p of layers without rotary embedding are multiplied by
    1 + ``query_beta`` * log(1 + (p + 1) // ``query_period``). ``qkv_bound`` b bounds queries, keys and values, before
    they are normed or rotated, to -b..b; 0: no bound.
    """

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    attention_input: float = 1.0
    attention_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0
    query_beta: float = 0.0
    query_period: int = 1
    qkv_bound: float = 0.0
