"""Families with latent attention."""

from typing import Any

from tandemrt.export.read import experts
from tandemrt.export.read import family as of
from tandemrt.export.read.families.common import DEEPSEEK
from tandemrt.export.read.family import Family
from tandemrt.export.read.latent import latent, latent_scales
from tandemrt.export.read.rope import RopeRules

_LATENT: dict[str, Any] = {"latent": latent, "scales": latent_scales, "biases": of.latent_biases}

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
        defaults={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        rope=RopeRules(interleaved=True),
        no_effect_values={"rope_interleave": (True,)},
        unused_fields=DEEPSEEK,
        experts=experts.deepseek_experts(),
        **_LATENT,
    ),
    Family(
        "mistral4",
        ("Mistral4ForCausalLM",),
        defaults={
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
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
