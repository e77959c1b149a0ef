"""A model family: the properties that its name implies, and readers of its config fields."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tandemrt.export.read.chunks import dual_chunk
from tandemrt.export.read.experts import no_experts
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.latent import Latent, not_latent
from tandemrt.export.read.layer import Activation, Experts, Heads, NormNames, QKNorm, Scales, Skip, Variants
from tandemrt.export.read.layer_kinds import RotaryReader, WindowReader, Windows, all_rotary, no_window
from tandemrt.export.read.recurrent import not_recurrent, numbers
from tandemrt.export.read.recurrent_layers import RecurrentLayers
from tandemrt.export.read.rope import RopeRules
from tandemrt.export.read.variants import uniform_layers

PRE_NORMS, PLAIN_ROPE = NormNames(), RopeRules()
ONE_NORM = NormNames("input_layernorm", None, None, None, parallel=True)  # for attention and MLP
SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}


class Biases(NamedTuple):
    """The matmuls that add a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False
    head: bool = False
    down: bool = False  # the last matmul of an MLP alone


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


def qkv_biases_if_configured(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias", False))


def use_qkv_bias(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("use_qkv_bias", False))


def qkv_and_mlp_biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias", False), mlp=fields.flag("mlp_bias", False))


def configured_qkv_bias(fields: Fields) -> Biases:
    fields.only("attention_bias", False)
    return Biases(qkv=fields.flag("qkv_bias", True))


def latent_biases(fields: Fields) -> Biases:
    """Biases of the output; export/read/latent.py reads those of latent vectors."""
    fields.only("mlp_bias", False)
    return Biases(out=fields.flag("attention_bias", False))


def phimoe_biases(fields: Fields) -> Biases:
    """Read ``attention_bias`` and ``lm_head_bias``."""
    attention = fields.flag("attention_bias", False)
    return Biases(attention, attention, head=fields.flag("lm_head_bias", False))


def always_biased(fields: Fields) -> Biases:  # noqa: ARG001
    return Biases(qkv=True, out=True, mlp=True)


def one_bias(fields: Fields) -> Biases:
    return Biases(*[fields.flag("use_bias", False)] * 3)


def key_value_heads(fields: Fields, heads: int) -> int:
    return fields.integer("num_key_value_heads", heads)


def one_head_if_multi_query(fields: Fields, heads: int) -> int:
    """Return the number of heads of keys and values: 1 with ``multi_query``."""
    fields.skip("num_key_value_heads")
    return 1 if fields.flag("multi_query", True) else heads


def hidden_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=10_000)


def one_norm_if_parallel(fields: Fields) -> NormNames:
    """StableLM: with ``use_parallel_residual`` attention and MLP read the same input."""
    parallel = fields.flag("use_parallel_residual", False)
    return ONE_NORM if parallel else PRE_NORMS


def no_skips(fields: Fields, layers: int) -> tuple[Skip, ...]:  # noqa: ARG001
    """No layer reads the stream of an earlier one."""
    return ()


def all_mlps(fields: Fields) -> tuple[bool, ...]:  # noqa: ARG001
    """Every layer has an MLP or experts."""
    return ()


def intermediate_size(fields: Fields) -> int:
    return fields.integer("intermediate_size")


def four_times(fields: Fields) -> int:
    """Return ``intermediate_size``, or four times the hidden size."""
    return fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))


def llama4_intermediate_size(fields: Fields) -> int:
    """Llama 4: the width of layers without experts."""
    return fields.integer("intermediate_size_mlp", 16_384)


def adjusted_intermediate_size(fields: Fields) -> int:
    """LFM2: two thirds of ``block_ff_dim``, rounded up, if ``block_auto_adjust_ff_dim`` is set."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12_288))
    multiplier, multiple = fields.number("block_ffn_dim_multiplier", 1.0), fields.integer("block_multiple_of", 256)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    adjusted = int(multiplier * int(2 * size / 3))
    return -(-adjusted // multiple) * multiple


def granite_intermediate_size(fields: Fields) -> int:
    """Granite 4: without experts the width of the shared MLP."""
    return fields.integer("intermediate_size" if fields.get("num_local_experts", 8) else "shared_intermediate_size")


def plain_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    return Scales(attention=head_dim**-0.5)


def granite_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    return Scales(
        attention=fields.number_or_absent("attention_multiplier", 1.0),
        embedding=fields.number_or_absent("embedding_multiplier", 1.0),
        residual=fields.number_or_absent("residual_multiplier", 1.0),
        logits=fields.number_or_absent("logits_scaling", 1.0),
    )


def minicpm_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:
    """MiniCPM: the residual factor follows from the number of layers, that of logits from the width."""
    return Scales(
        attention=head_dim**-0.5,
        embedding=fields.number("scale_emb", 1.0),
        residual=fields.number("scale_depth", 1.0) / fields.integer("num_hidden_layers") ** 0.5,
        logits=hidden / fields.integer("dim_model_base", 1),
    )


def hyperclovax_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:
    """The multipliers of Granite, but for logits; without one of attention the common scale."""
    common = fields.get("attention_multiplier") is None
    scales = granite_scales(fields, head_dim, hidden)
    return replace(scales, attention=head_dim**-0.5 if common else scales.attention, logits=1 / scales.logits)


def query_scalar(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Step 3.5: ``query_pre_attn_scalar`` in place of the size of a head."""
    return Scales(attention=fields.number("query_pre_attn_scalar", head_dim) ** -0.5)


def bounded_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """OLMo 1: ``clip_qkv`` bounds queries, keys and values."""
    bound = 0.0 if fields.get("clip_qkv") is None else fields.number("clip_qkv")
    return Scales(attention=head_dim**-0.5, qkv_bound=bound)


def embedding_scale(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Gemma 1: embeddings are scaled."""
    return Scales(attention=head_dim**-0.5, embedding=hidden**0.5)


def mup_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:
    """AFMoE: embeddings are scaled with ``mup_enabled``."""
    scaled = fields.flag("mup_enabled", False)
    return embedding_scale(fields, head_dim, hidden) if scaled else plain_scales(fields, head_dim, hidden)


def falcon_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Falcon-H1: a constant factor at every matmul."""
    gate, output = numbers(fields, "mlp_multipliers", 2)
    return Scales(
        attention=head_dim**-0.5 * fields.number("key_multiplier", 1.0),
        embedding=fields.number("embedding_multiplier", 1.0),
        logits=1 / fields.number("lm_head_multiplier", 1.0),
        attention_input=fields.number("attention_in_multiplier", 1.0),
        attention_output=fields.number("attention_out_multiplier", 1.0),
        mlp_gate=gate,
        mlp_output=output,
    )


def llama4_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Llama 4 scales queries of layers without rotary embedding by their position."""
    fields.only("attn_temperature_tuning", True, False, 4)  # 4 was written for true
    beta, period = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    tuned = bool(fields.get("attn_temperature_tuning", True))
    return Scales(head_dim**-0.5, query_beta=beta if tuned else 0.0, query_period=period if tuned else 1)


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


@dataclass(frozen=True)
class Family:
    """A row of the table of families. ``architectures``: their names in configs. ``name``: their model_type.
    ``aliases``: further values of model_type.

    ``field_names``: the family's names of fields, with the common name of each. ``defaults``: values of fields that a
    config may omit. ``no_effect_values``: the values of a field that do not change the graph; others are rejected.
    ``unused_fields``: fields that never change the graph. ``activations``: the accepted values of ``activation_field``.
    ``norm_offset``: norm weights are stored minus 1. ``gated``: the MLP has a gate. ``longest``: the longest text that
    the graph reads as the model does. ``layer_norm``, ``norm_weights``, ``norm_biases``, ``stored_by_head``,
    ``normed_head``, ``position_offset``, ``skips``, ``sinks``, ``gated_attention``, ``mlp_layers``,
    ``recurrent_norms``: see ModelSpec. ``tensor_names``: see export/read/families/tensor_names.py.
    ``one_part_per_block``: a layer is stored as one or two blocks with a norm and a mixer each; the second is its MLP.
    ``transposed``: matrices of layers are stored as [inputs, outputs]. ``qk_norm_flag``: the flag that enables
    ``qk_norm``; None: no flag.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    no_effect_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused_fields: tuple[str, ...] = ()
    layers: Callable[[Fields], int] = hidden_layers
    mlp_layers: Callable[[Fields], tuple[bool, ...]] = all_mlps
    intermediate: Callable[[Fields], int] = intermediate_size
    kv_heads: Callable[[Fields, int], int] = key_value_heads
    norms: NormNames | Callable[[Fields], NormNames] = PRE_NORMS
    recurrent_norms: NormNames | None = None
    norm_eps_field: str = "rms_norm_eps"
    norm_offset: bool = False
    qk_norm: QKNorm | None = None
    qk_norm_flag: str | None = None
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
    gated_attention: bool = False
    recurrent: Callable[[Fields, int], RecurrentLayers | None] = not_recurrent
    latent: Callable[[Fields], Latent | None] = not_latent
    layer_norm: bool = False
    norm_weights: bool = True
    norm_biases: bool = True
    stored_by_head: tuple[str, ...] = ()
    normed_head: bool = False
    position_offset: int | None = None
    transposed: bool = False
    skips: Callable[[Fields, int], tuple[Skip, ...]] = no_skips
    longest: Callable[[Fields], int] = dual_chunk
    variants: Callable[[Fields, Heads, Windows], Variants] = uniform_layers
    aliases: tuple[str, ...] = ()
    tensor_names: tuple[tuple[re.Pattern[str], str], ...] = ()
    one_part_per_block: bool = False
    field_names: Mapping[str, str] = field(default_factory=dict)
