"""Families whose attention and MLP read the residual stream at the same place."""

from typing import Any

from tandemrt.export.read import family as of
from tandemrt.export.read.experts import cohere2_experts
from tandemrt.export.read.families import tensor_names
from tandemrt.export.read.families.common import GELU, GELU_TANH, GPT_FIELDS, GPT_UNUSED, ROUTER, TRAINING
from tandemrt.export.read.family import Biases, Family
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import NormNames, QKNorm, Scales
from tandemrt.export.read.layer_kinds import (
    alternating_windows,
    cohere2_moe_rotary,
    cohere2_moe_windows,
    sliding_rotary,
)
from tandemrt.export.read.rope import RopeRules


def _cohere_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    return Scales(attention=head_dim**-0.5, logits=1 / fields.number("logit_scale", 0.0625))


def _dense_width(fields: Fields) -> int:
    """Command A with experts: the width of layers without experts."""
    return fields.integer("prefix_dense_intermediate_size", fields.integer("intermediate_size"))


def _neox_norms(fields: Fields) -> NormNames:
    return NormNames(parallel=fields.flag("use_parallel_residual", True))


def _falcon_norms(fields: Fields) -> NormNames:
    """Falcon 7B and 11B have one norm, 40B and 180B one for each part; older ones may be sequential."""
    new = fields.flag("new_decoder_architecture", False)  # whatever the older fields say
    fields.skip("multi_query", "parallel_attn")
    if new and fields.integer("num_ln_in_parallel_attn", 2) == 2:
        return NormNames("ln_attn", None, "ln_mlp", None, parallel=True)
    return of.ONE_NORM if new or fields.flag("parallel_attn", True) else NormNames()


def _neox_biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", True)
    return Biases(attention, attention, mlp=True)


def _gptj_biases(fields: Fields) -> Biases:  # noqa: ARG001
    return Biases(mlp=True, head=True)


def _falcon_biases(fields: Fields) -> Biases:
    return Biases(*[fields.flag("bias", False)] * 3)


def _phi_biases(fields: Fields) -> Biases:  # noqa: ARG001
    return Biases(qkv=True, out=True, mlp=True, head=True)


def _falcon_heads(fields: Fields, heads: int) -> int:
    """Return the number of heads of keys and values: 1 for multi-query attention, if it is not in groups."""
    if fields.flag("new_decoder_architecture", False):
        return of.key_value_heads(fields, heads)
    return of.one_head_if_multi_query(fields, heads)


_COHERE: dict[str, Any] = {
    "norms": of.ONE_NORM,
    "layer_norm": True,
    "norm_biases": False,
    "norm_eps_field": "layer_norm_eps",
    "scales": _cohere_scales,
    "biases": of.attention_biases,
}

ROWS = (
    Family(
        "cohere",
        ("CohereForCausalLM",),
        defaults={"max_position_embeddings": 8192, "tie_word_embeddings": True},
        rope=RopeRules(default={"rope_theta": 500_000.0}, interleaved=True),
        qk_norm=QKNorm(by_head=True),
        qk_norm_flag="use_qk_norm",
        unused_fields=TRAINING,
        **_COHERE,
    ),
    Family(
        "cohere2",
        ("Cohere2ForCausalLM",),
        defaults={"sliding_window": 4096, "tie_word_embeddings": True},
        windows=alternating_windows(4, named="sliding_window_pattern"),
        rotary=sliding_rotary,
        rope=RopeRules(interleaved=True),
        no_effect_values={
            "layer_switch": (4,),
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
        },
        unused_fields=(*TRAINING, "use_parallel_embedding"),
        **_COHERE,
    ),
    Family(
        "cohere2_moe",
        ("Cohere2MoeForCausalLM",),
        defaults={"head_dim": 128, "sliding_window": 4096, "tie_word_embeddings": True, "first_k_dense_replace": 0},
        intermediate=_dense_width,
        windows=cohere2_moe_windows,
        rotary=cohere2_moe_rotary,
        rope=RopeRules(interleaved=True),
        no_effect_values={"rms_norm_eps": (None,)},
        unused_fields=ROUTER,
        experts=cohere2_experts,
        **_COHERE,
    ),
    Family(
        "gpt_neox",
        ("GPTNeoXForCausalLM",),
        tensor_names=tensor_names.GPT_NEOX,
        field_names={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        norms=_neox_norms,
        layer_norm=True,
        norm_eps_field="layer_norm_eps",
        biases=_neox_biases,
        stored_by_head=("q", "k", "v"),
        rope=RopeRules(partial=0.25),
        activations={**GELU, **GELU_TANH},
        gated=False,
        unused_fields=("hidden_dropout", "classifier_dropout", "gradient_checkpointing"),
    ),
    Family(
        "gptj",
        ("GPTJForCausalLM",),
        tensor_names=tensor_names.GPTJ,
        defaults={"rotary_dim": 64},
        field_names=GPT_FIELDS,
        intermediate=of.four_times,
        norms=of.ONE_NORM,
        layer_norm=True,
        norm_eps_field="layer_norm_epsilon",
        biases=_gptj_biases,
        rope=RopeRules(partial=1.0, rotated_field="rotary_dim", interleaved=True),
        activations=GELU_TANH,
        activation_field="activation_function",
        gated=False,
        no_effect_values={"rotary": (True,), "scale_attn_weights": (True,)},
        unused_fields=GPT_UNUSED,
    ),
    Family(
        "falcon",
        ("FalconForCausalLM", "RWForCausalLM"),
        aliases=("RefinedWeb", "RefinedWebModel"),
        tensor_names=tensor_names.FALCON,
        field_names={
            "ffn_hidden_size": "intermediate_size",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_key_value_heads",
            "n_layer": "num_hidden_layers",
            "num_kv_heads": "num_key_value_heads",
        },
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
        kv_heads=_falcon_heads,
        intermediate=of.four_times,
        norms=_falcon_norms,
        layer_norm=True,
        norm_eps_field="layer_norm_epsilon",
        biases=_falcon_biases,
        stored_by_head=("q", "k", "v"),
        activations=GELU,
        activation_field="activation",
        gated=False,
        no_effect_values={"alibi": (False,), "apply_residual_connection_post_layernorm": (False,)},
        unused_fields=("hidden_dropout", "n_inner", "rotary"),
    ),
    Family(
        "phi",
        ("PhiForCausalLM",),
        tensor_names=tensor_names.PHI,
        norms=of.ONE_NORM,
        layer_norm=True,
        norm_eps_field="layer_norm_eps",
        biases=_phi_biases,
        rope=RopeRules(partial=0.5),
        activations=GELU_TANH,
        gated=False,
        no_effect_values={"qk_layernorm": (False,)},
        unused_fields=TRAINING,
    ),
)
