"""Families whose positions are learned: a table with an embedding for each position, which the token's is added to."""

from typing import Any

from tandemrt.export.read import family as of
from tandemrt.export.read.families import tensor_names
from tandemrt.export.read.families.common import GELU, GELU_TANH, GPT_FIELDS, GPT_UNUSED
from tandemrt.export.read.family import Biases, Family
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer_kinds import no_rotary


def _all_heads(fields: Fields, heads: int) -> int:
    fields.skip("num_key_value_heads")
    return heads


def _biases(fields: Fields) -> Biases:
    fields.only("enable_bias", True)
    return of.always_biased(fields)


def _opt_intermediate(fields: Fields) -> int:
    fields.only("word_embed_proj_dim", fields.integer("hidden_size"))
    return fields.integer("intermediate_size")


_LEARNED: dict[str, Any] = {
    "layer_norm": True,
    "rotary": no_rotary,
    "activation_field": "activation_function",
    "gated": False,
}
_GPT2: dict[str, Any] = {
    **_LEARNED,
    "tensor_names": tensor_names.GPT_BIGCODE,
    "field_names": GPT_FIELDS,
    "defaults": {"tie_word_embeddings": True},
    "intermediate": of.four_times,
    "norm_eps_field": "layer_norm_epsilon",
    "biases": of.always_biased,
    "position_offset": 0,
}

ROWS = (
    Family(
        "gpt2",
        ("GPT2LMHeadModel",),
        transposed=True,
        kv_heads=_all_heads,
        activations={**GELU_TANH, **GELU, "relu": "relu"},
        no_effect_values={
            "reorder_and_upcast_attn": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        },
        unused_fields=GPT_UNUSED,
        **_GPT2,
    ),
    Family(
        "gpt_bigcode",
        ("GPTBigCodeForCausalLM",),
        kv_heads=of.one_head_if_multi_query,
        stored_by_head=("q", "k", "v"),
        activations={**GELU_TANH, **GELU},
        no_effect_values={
            "attention_softmax_in_fp32": (True, False),  # it is always in float32
            "scale_attention_softmax_in_fp32": (True, False),
            "scale_attn_weights": (True,),
        },
        unused_fields=(
            *GPT_UNUSED,
            *("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
            "validate_runner_input",
        ),
        **_GPT2,
    ),
    Family(
        "opt",
        ("OPTForCausalLM",),
        tensor_names=tensor_names.OPT,
        field_names={"ffn_dim": "intermediate_size"},
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},  # whatever the config says
        intermediate=_opt_intermediate,
        biases=_biases,
        position_offset=2,
        activations={"relu": "relu", **GELU},
        no_effect_values={
            "_remove_final_layer_norm": (False,),
            "do_layer_norm_before": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        unused_fields=("activation_dropout", "dropout", "init_std", "layerdrop"),
        **_LEARNED,
    ),
)
