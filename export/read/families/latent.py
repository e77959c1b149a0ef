"""Families with latent attention."""

from dataclasses import replace
from typing import Any

from tandemrt.export.read import experts
from tandemrt.export.read import family as of
from tandemrt.export.read.chunks import chosen_keys
from tandemrt.export.read.families.common import DEEPSEEK, LING_FIELDS, NORMS_AROUND_MLP
from tandemrt.export.read.family import Family
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.latent import latent, latent_scales, minicpm3_latent
from tandemrt.export.read.layer import Scales
from tandemrt.export.read.layer_kinds import indexed_as_full
from tandemrt.export.read.rope import RopeRules

_LATENT: dict[str, Any] = {"latent": latent, "scales": latent_scales, "biases": of.latent_biases}
_DEEPSEEK_V3: dict[str, Any] = {
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
# The index leaves no key out of a text that a build accepts, so its weights are left out.
_INDEXED: dict[str, Any] = {
    "field_names": {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
    **_LATENT,
    "windows": indexed_as_full,
    "longest": chosen_keys,
    "rope": RopeRules(interleaved=True),
    "no_effect_values": {
        "rope_interleave": (True,),
        "mlp_bias": (False,),
        "moe_router_dtype": ("float32",),  # routers compute in float32
    },
    "unused_fields": (
        *DEEPSEEK,
        *("index_head_dim", "index_n_heads", "indexer_rope_interleave", "indexer_types", "index_topk_freq"),
        *("index_skip_topk_offset", "index_topk_pattern", "index_share_for_mtp_iteration"),
    ),
    "experts": experts.deepseek_experts(),
}


def _minicpm3_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:
    """MiniCPM 3: the factors of MiniCPM, with the scale of latent attention."""
    attention = latent_scales(fields, head_dim, hidden).attention
    return replace(of.minicpm_scales(fields, head_dim, hidden), attention=attention)


ROWS = (
    Family(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        defaults={"q_lora_rank": 1536, "first_k_dense_replace": 0},
        rope=RopeRules(interleaved=True),
        unused_fields=DEEPSEEK,
        experts=experts.deepseek_v2_experts,
        **_LATENT,
    ),
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        aliases=("kimi_k2",),
        defaults=_DEEPSEEK_V3,
        rope=RopeRules(interleaved=True),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.deepseek_experts(),
        **_LATENT,
    ),
    Family("deepseek_v32", ("DeepseekV32ForCausalLM",), defaults=_DEEPSEEK_V3, **_INDEXED),
    Family(
        "glm_moe_dsa",
        ("GlmMoeDsaForCausalLM",),
        defaults=_DEEPSEEK_V3
        | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1},
        **_INDEXED,
    ),
    Family(
        "mistral4",
        ("Mistral4ForCausalLM",),
        defaults={
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
        },
        rope=RopeRules(partial=1.0, interleaved=True, rotated_field="qk_rope_head_dim"),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.mistral4_experts,
        **_LATENT,
    ),
    Family(
        "minicpm3",
        ("MiniCPM3ForCausalLM",),
        defaults={"tie_word_embeddings": True, "q_lora_rank": 768, "kv_lora_rank": 256}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        no_effect_values={"pretraining_tp": (1,)},
        **_LATENT | {"latent": minicpm3_latent, "scales": _minicpm3_scales},
    ),
    Family(
        "axk1",
        ("AXK1ForCausalLM",),
        defaults=_DEEPSEEK_V3 | {"n_routed_experts": 192, "first_k_dense_replace": 1},
        rope=RopeRules(interleaved=True),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.axk1_experts,
        **_LATENT,
    ),
    Family(
        "sarvam_mla",
        ("SarvamMLAForCausalLM",),
        defaults={"first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        field_names=LING_FIELDS,
        rope=RopeRules(interleaved=True),
        no_effect_values={"moe_router_enable_expert_bias": (True,), "router_dtype": ("fp32",)},
        unused_fields=(*DEEPSEEK, "moe_shared_expert_intermediate_size"),
        experts=experts.deepseek_experts(),
        **_LATENT,
    ),
    Family(
        "pangu_ultra_moe",
        ("PanguUltraMoEForCausalLM",),
        defaults={**_DEEPSEEK_V3, "n_group": 1, "topk_group": 1},
        norms=NORMS_AROUND_MLP,
        field_names={"num_dense_layers": "first_k_dense_replace"},
        rope=RopeRules(interleaved=True),
        no_effect_values={"rope_interleave": (True,), "sandwich_norm": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.pangu_experts,
        **_LATENT,
    ),
    Family(
        "youtu",
        ("YoutuForCausalLM",),
        defaults={"q_lora_rank": 1536, "tie_word_embeddings": True},
        rope=RopeRules(interleaved=True),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=("embedding_initializer_range",),
        **_LATENT,
    ),
    Family(
        "glm4_moe_lite",
        ("Glm4MoeLiteForCausalLM",),
        defaults={
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
        },
        rope=RopeRules(partial=1.0, interleaved=True),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.deepseek_experts(),
        **_LATENT,
    ),
)
