"""A model family: the properties that its name implies, and readers of its config fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import Activation, ClampedSwiglu, Experts, NormNames, QKNorm, Scales
from tandemrt.export.read.layer_kinds import RotaryReader, WindowReader, all_rotary, no_window
from tandemrt.export.read.rope import RopeRules

PRE_NORMS, PLAIN_ROPE = NormNames(), RopeRules()
SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}


class Biases(NamedTuple):
    """The matmuls that add a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def no_bias(fields: Fields) -> Biases:
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return Biases()


def named_biases(fields: Fields) -> Biases:
    """Read ``attention_bias`` (queries, keys, values and output) and ``mlp_bias``."""
    attention = fields.flag("attention_bias", False)
    return Biases(attention, attention, fields.flag("mlp_bias", False))


def attention_biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", False)
    fields.only("mlp_bias", False)
    return Biases(attention, attention)


def qkv_biases(fields: Fields) -> Biases:
    fields.only("attention_bias", True)
    return Biases(qkv=True)


def seed_biases(fields: Fields) -> Biases:
    out = fields.flag("attention_out_bias", False)
    return Biases(fields.flag("attention_bias", True), out, fields.flag("mlp_bias", False))


def mlp_bias(fields: Fields) -> Biases:
    fields.only("attention_bias", False)
    return Biases(mlp=fields.flag("mlp_bias", False))


def glm_biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias", True))


def one_bias(fields: Fields) -> Biases:
    return Biases(*[fields.flag("use_bias", False)] * 3)


def plain_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    return Scales(attention=head_dim**-0.5)


def granite_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    return Scales(
        attention=fields.number_or_absent("attention_multiplier", 1.0),
        embedding=fields.number_or_absent("embedding_multiplier", 1.0),
        residual=fields.number_or_absent("residual_multiplier", 1.0),
        logits=fields.number_or_absent("logits_scaling", 1.0),
    )


def gemma_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    caps = [fields.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")]
    attention, logits = (
        0.0 if cap is None else fields.number(name)
        for cap, name in zip(caps, ("attn_logit_softcapping", "final_logit_softcapping"), strict=True)
    )
    return Scales(
        attention=fields.number_or_absent("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding=hidden**0.5,
        attention_softcap=attention,
        logits_softcap=logits,
    )


def no_experts(fields: Fields, layers: int) -> None:
    """A dense model."""


def mixtral_experts(fields: Fields, layers: int) -> Experts:
    """Mixtral: experts in every layer."""
    count, chosen = fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)
    return _experts(count, chosen, fields.integer("intermediate_size"), True, (True,) * layers)


def qwen_experts(fields: Fields, layers: int) -> Experts:
    """Qwen3-MoE: experts in one of ``decoder_sparse_step`` layers, except in ``mlp_only_layers``."""
    count = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise BadCheckpoint(f"config.json: mlp_only_layers should be a list of layers, it is {quoted(dense)}")
    return _experts(
        count,
        fields.integer("num_experts_per_tok", 8),
        fields.integer("moe_intermediate_size", 768),
        fields.flag("norm_topk_prob", False),
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def gpt_oss_experts(fields: Fields, layers: int) -> Experts:
    """gpt-oss: experts in every layer, with biases, interleaved gate and up, and a clamped SwiGLU."""
    chosen = fields.integer("num_experts_per_tok", 4)
    fields.only("experts_per_token", chosen)  # an alias of num_experts_per_tok
    experts = _experts(
        fields.integer("num_local_experts", 128), chosen, fields.integer("intermediate_size"), True, (True,) * layers
    )
    clamped = ClampedSwiglu(
        fields.number_or_absent("swiglu_alpha", 1.702), fields.number_or_absent("swiglu_limit", 7.0)
    )
    return replace(experts, biased=True, gate_up="interleaved", clamped=clamped)


def _experts(count: int, chosen: int, intermediate: int, normalized: bool, layers: tuple[bool, ...]) -> Experts:
    if chosen > count:
        raise BadCheckpoint(
            f"config.json: num_experts_per_tok should be at most the number of experts, {count}, it is {chosen}"
        )
    return Experts(count, chosen, intermediate, normalized, layers)


@dataclass(frozen=True)
class Family:
    """A row of the table of families. ``architectures``: their names in configs. ``name``: their model_type.

    ``defaults``: values of fields that a config may omit. ``no_effect_values``: the values of a field that do not
    change the graph; others are rejected. ``unused_fields``: fields that never change the graph. ``activations``: the
    accepted values of ``activation_field``. ``norm_offset``: norm weights are stored minus 1. ``gated``: the MLP has a
    gate. ``sinks``: see ModelSpec.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    no_effect_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused_fields: tuple[str, ...] = ()
    norms: NormNames = PRE_NORMS
    norm_offset: bool = False
    qk_norm: QKNorm | None = None
    sinks: bool = False
    biases: Callable[[Fields], Biases] = no_bias
    windows: WindowReader = no_window
    rotary: RotaryReader = all_rotary
    rope: RopeRules = PLAIN_ROPE
    scales: Callable[[Fields, int, int], Scales] = plain_scales
    activations: Mapping[str, Activation] = field(default_factory=lambda: SILU)
    activation_field: str = "hidden_act"
    gated: bool = True
    experts: Callable[[Fields, int], Experts | None] = no_experts
