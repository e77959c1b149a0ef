"""Configurations of tiny models of every family, with the fields of published configs, scaled down."""

from collections.abc import Callable
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

LENGTH = 72  # compared tokens: three times the sliding window, and longer than the unscaled range of rotary positions
WINDOW = 24
_DIMS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_HEADS = {"head_dim": 16}
_ALTERNATING = ["sliding_attention", "full_attention"]
_THETA = {"rope_type": "default", "rope_theta": 500.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 20}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 512,  # as published: the kernels have these widths alone
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 20,
}
_MHA = {"num_key_value_heads": 4}
_SQUARE = {"hidden_size": 64}  # heads of 16 values in families without head_dim
_GPT: dict[str, Any] = {"hidden_size": 128, "intermediate_size": None, "num_key_value_heads": None}
_GROUPED_FALCON: dict[str, Any] = {"num_kv_heads": 2, "new_decoder_architecture": True, "rope_parameters": _THETA}
_GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "rope_parameters": _THETA,
}

_GEMMA4: dict[str, Any] = {
    **_HEADS,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 61,
    "sliding_window": WINDOW,
    "layer_types": _ALTERNATING,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.25},
        "sliding_attention": _THETA,
    },
}
_DELTA_NET: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": _THETA | {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}

_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
}

_FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.4,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.2,
    "mlp_multipliers": [0.8, 0.3],
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35],
    "ssm_out_multiplier": 0.6,
    "mamba_chunk_size": 8,
    "rope_parameters": _THETA,
}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": 20,
    }


def _of(model_type: str, **fields: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, **_DIMS | fields)


def of_config(config: PreTrainedConfig, **how: Any) -> PreTrainedModel:
    """Make the model of a case: a text model, or a vision-language one where transformers has no other class."""
    maker = AutoModelForImageTextToText if config.model_type == "step3p7" else AutoModelForCausalLM
    return maker.from_config(config, **how)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "seed_oss": _of("seed_oss", **_HEADS, attention_bias=True, attention_out_bias=False, rope_parameters=_THETA),
    "mistral3": _of("mistral", **_HEADS, sliding_window=None, rope_parameters=_THETA),
    "ministral3": _of("ministral3", **_HEADS, rope_parameters=_MINISTRAL | {"llama_4_scaling_beta": 0.1}),
    "devstral2": _of("ministral3", **_HEADS, rope_parameters=_MINISTRAL | {"llama_4_scaling_beta": 0.0}),
    "granite": _of(
        "granite",
        **_HEADS,
        tie_word_embeddings=True,
        attention_multiplier=0.1,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "phi3": _of("phi3", **_HEADS, sliding_window=WINDOW, rope_parameters=_THETA),
    "phi4-mini": _of(
        "phi3",
        head_dim=64,
        hidden_size=256,
        tie_word_embeddings=True,
        rope_parameters=_longrope(24) | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=20,
    ),
    "smollm3": _of("smollm3", **_HEADS, no_rope_layers=[1, 0], rope_parameters=_THETA),
    "arcee": _of("arcee", **_HEADS, rope_parameters=_YARN),
    "cwm": _of("cwm", **_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING[::-1], rope_parameters=_LLAMA3),
    "olmo2": _of("olmo2", **_HEADS, num_key_value_heads=4, rope_parameters=_THETA),
    "olmo3": _of(
        "olmo3",
        **_HEADS,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={"full_attention": _YARN, "sliding_attention": _THETA},
    ),
    "gemma": _of("gemma", **_HEADS, rope_parameters=_THETA),
    "vaultgemma": _of(
        "vaultgemma",
        **_HEADS,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_parameters=_THETA,
    ),
    "gemma2": _of(
        "gemma2",
        **_HEADS,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_parameters=_THETA,
    ),
    "gemma3": _of(
        "gemma3_text",
        **_HEADS,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
            "sliding_attention": _THETA,
        },
    ),
    "gemma4": _of(  # E2B and E4B
        "gemma4_text",
        **_GEMMA4 | {"num_hidden_layers": 5, "layer_types": [*_ALTERNATING, *_ALTERNATING, "full_attention"]},
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        final_logit_softcapping=3.0,
    ),
    "gemma4 dense": _of(  # 31B
        "gemma4_text",
        **_GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
    ),
    "gemma4 experts": _of(  # 26B-A4B
        "gemma4_text",
        **_GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "glm": _of("glm", head_dim=32, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
    "helium": _of("helium", **_HEADS | _SQUARE, rope_parameters=_THETA),
    "hyperclovax": _of("hyperclovax", **_HEADS | _GRANITE),
    "granite_swa": _of(
        "granite_swa",
        **_HEADS | _GRANITE,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING[::-1],
        layer_rope_theta=[0, 500.0],
    ),
    "ministral": _of("ministral", **_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING, rope_parameters=_THETA),
    "stablelm": _of(
        "stablelm", hidden_size=256, use_qkv_bias=True, rope_parameters=_THETA | {"partial_rotary_factor": 0.25}
    ),
    "stablelm 12b": _of(
        "stablelm",
        hidden_size=256,
        qk_layernorm=True,
        use_parallel_residual=True,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.25},
    ),
    "starcoder2": _of("starcoder2", **_SQUARE, sliding_window=WINDOW, rope_parameters=_THETA),
    "nemotron": _of("nemotron", head_dim=32, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
    "jais2": _of("jais2", **_HEADS, rope_parameters=_THETA),
    "youtu": _of("youtu", **_LATENT, rope_parameters=_THETA),
    "glm4": _of("glm4", head_dim=32, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
    "exaone4": _of("exaone4", **_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING, rope_parameters=_LLAMA3),
    "exaone4 full": _of(
        "exaone4", **_HEADS, sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=_LLAMA3
    ),
    "hunyuan": _of(
        "hunyuan_v1_dense",
        **_HEADS,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 10.0, "factor": 1.0},
    ),
    "mixtral": _of("mixtral", **_HEADS, sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _of(
        "qwen3_moe",
        **_HEADS,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=_THETA,
    ),
    "qwen3_moe with a dense layer": _of(
        "qwen3_moe", **_HEADS, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, mlp_only_layers=[0]
    ),
    "gpt_oss": _of(
        "gpt_oss",
        **_HEADS,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=2.0,
        rope_parameters=_YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "deepseek_v2 lite": _of(
        "deepseek_v2",
        **_EXPERTS | _LATENT | _GROUPS | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
        topk_method="greedy",
        first_k_dense_replace=1,
        rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2": _of(
        "deepseek_v2",
        **_EXPERTS | _LATENT | _GROUPS | {"norm_topk_prob": False},
        topk_method="group_limited_greedy",
        first_k_dense_replace=0,
        rope_parameters=_THETA,
    ),
    "deepseek_v3": _of(
        "deepseek_v3",
        **_EXPERTS | _LATENT | _GROUPS,
        first_k_dense_replace=1,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe_lite": _of("glm4_moe_lite", **_EXPERTS | _LATENT | _GROUPS, rope_parameters=_THETA),
    "phimoe": _of(
        "phimoe",
        **_SQUARE,
        attention_bias=True,
        lm_head_bias=True,
        num_local_experts=6,
        router_jitter_noise=0.3,
        sliding_window=WINDOW,
        # One list: transformers' class reads the short one for long texts, too; the published code does not.
        rope_parameters=_longrope(8)
        | {"long_factor": _longrope(8)["short_factor"]}
        | {"short_mscale": 1.2, "long_mscale": 1.3},
    ),
    "llama4": _of(
        "llama4_text",
        **_HEADS | {"num_hidden_layers": 3},
        intermediate_size_mlp=56,
        num_local_experts=4,
        moe_layers=[1, 2],
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=128,
        floor_scale=8,
        rope_parameters=_LLAMA3,
    ),
    "mimo_v2_flash": _of(
        "mimo_v2_flash",
        head_dim=48,
        v_head_dim=32,
        **_EXPERTS,
        n_routed_experts=6,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING[::-1],
        rope_parameters={
            "full_attention": _THETA | {"partial_rotary_factor": 0.334},
            "sliding_attention": _THETA | {"rope_theta": 90.0, "partial_rotary_factor": 0.334},
        },
    ),
    "step3p5": lambda: AutoConfig.for_model(  # transformers has it as the text part of Step 3.7 alone
        "step3p7",
        architectures=["Step3p7ForConditionalGeneration"],  # config.json of a saved one says so
        text_config=_DIMS
        | _EXPERTS
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "pad_token_id": 1,
            "n_routed_experts": 4,
            "share_expert_dim": 20,
            "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 3.0,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "swiglu_limits": [None, 0.3, 0.0],
            "swiglu_limits_shared": [0.2, 0.4, 0.0],
            "rope_parameters": {
                "full_attention": _LLAMA3 | {"partial_rotary_factor": 0.5},
                "sliding_attention": _THETA | {"rope_theta": 90.0},
            },
        },
        vision_config={
            "width": 32,
            "layers": 1,
            "heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "mlp_ratio": 1.0,
        },
        tie_word_embeddings=False,
    ),
    "mellum": _of(
        "mellum",
        **_HEADS | _EXPERTS,
        num_experts=6,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        mlp_layer_types=["dense", "sparse"],
        rope_parameters={"full_attention": _YARN, "sliding_attention": _THETA},
    ),
    "qwen2_moe": _of(
        "qwen2_moe",
        **_HEADS | _EXPERTS,
        num_experts=6,
        shared_expert_intermediate_size=32,
        qkv_bias=True,
        rope_parameters=_THETA,
    ),
    "olmoe": _of("olmoe", num_experts=6, num_experts_per_tok=3, rope_parameters=_THETA, **_SQUARE),
    "flex_olmo": _of("flex_olmo", num_experts=6, num_experts_per_tok=3, rope_parameters=_THETA, **_SQUARE),
    "granitemoe": _of("granitemoe", **_SQUARE | _GRANITE, num_local_experts=6, num_experts_per_tok=3),
    "flint": _of(
        "flint",
        **_HEADS,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters=_THETA,
    ),
    "granitemoe_swa": _of(
        "granitemoe_swa",
        **_HEADS | _GRANITE,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=24,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING[::-1],
        layer_rope_theta=[0, 500.0],
    ),
    "iquestcoder": _of("iquestcoder", **_HEADS, rope_parameters=_THETA),
    "internlm3": _of("internlm3", **_HEADS, attention_bias=True, mlp_bias=True, rope_parameters=_THETA),
    "granitemoeshared": _of(
        "granitemoeshared",
        **_SQUARE | _GRANITE,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=24,
    ),
    "ernie4_5_moe": _of(
        "ernie4_5_moe",
        **_HEADS,
        moe_intermediate_size=24,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=2,
        rope_parameters=_THETA,
    ),
    "hunyuan_v1_moe": _of(
        "hunyuan_v1_moe",
        **_HEADS,
        num_experts=6,
        moe_topk=[3, 3],
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 10.0, "factor": 1.0},
    ),
    "glm4_moe": _of(
        "glm4_moe",
        head_dim=32,
        **_EXPERTS,
        **_GROUPS,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "glm4_moe air": _of(
        "glm4_moe",
        head_dim=32,
        **_EXPERTS,
        n_routed_experts=6,
        n_shared_experts=1,
        attention_bias=True,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "solar_open": _of("solar_open", **_HEADS | _EXPERTS, **_GROUPS, rope_parameters=_YARN),
    "dots1": _of(
        "dots1", **_HEADS | _EXPERTS, **_GROUPS, first_k_dense_replace=1, sliding_window=None, rope_parameters=_THETA
    ),
    "exaone_moe": _of(
        "exaone_moe",
        **_HEADS | _EXPERTS,
        num_experts=6,
        num_shared_experts=1,
        first_k_dense_replace=1,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters=_LLAMA3,
    ),
    "hy_v3": _of(
        "hy_v3", **_HEADS | _EXPERTS, num_experts=6, num_shared_experts=2, rope_parameters=_THETA, use_cache=True
    ),
    "minimax_m2": _of(
        "minimax_m2",
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "qwen3_5": _of("qwen3_5_text", **_DELTA_NET),
    "qwen3_5_moe": _of("qwen3_5_moe_text", **_DELTA_NET | _EXPERTS, shared_expert_intermediate_size=24, num_experts=6),
    "qwen3_next": _of(
        "qwen3_next",
        **_DELTA_NET | _EXPERTS,
        shared_expert_intermediate_size=32,
        num_experts=6,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "lfm2": _of("lfm2", **_SQUARE, layer_types=["conv", "full_attention", "conv", "conv"], num_hidden_layers=4),
    "lfm2_moe": _of(
        "lfm2_moe",
        **_SQUARE | _EXPERTS,
        layer_types=["conv", "conv", "full_attention"],
        num_hidden_layers=3,
        num_experts=6,
        num_dense_layers=1,
        conv_L_cache=4,
        conv_bias=True,
    ),
    "lfm3": _of(
        "lfm3",
        **_HEADS,
        layer_types=["conv", "conv", "full_attention", "conv", "sliding_attention"],
        num_hidden_layers=5,
        sliding_window=WINDOW,
        rope_parameters={
            "sliding_attention": _THETA,
            "full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granite 4": _of(
        "granitemoehybrid",
        **_SQUARE | _GRANITE | _MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=24,
    ),
    "granite 4 dense": _of(
        "granitemoehybrid",
        **_SQUARE | _GRANITE | _MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=24,
        position_embedding_type="rope",
    ),
    "bamba": _of("bamba", hidden_size=128, **_MAMBA | {"mamba_n_heads": 16}, attn_layer_indices=[1]),
    "falcon_h1": _of("falcon_h1", **_SQUARE | _FALCON),
    "falcon_h1 with norms": _of("falcon_h1", **_SQUARE | _FALCON | {"mamba_rms_norm": True}),
    "nemotron_h": _of(
        "nemotron_h",
        **_HEADS | _EXPERTS | _GROUPS | {"n_shared_experts": 1},
        layers_block_type=[*("linear_attention", "moe", "linear_attention", "full_attention"), "mlp"],
        num_hidden_layers=5,
        moe_latent_size=20,  # as in Nemotron 3 Super; Nano has none
        moe_shared_expert_intermediate_size=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=32,
        chunk_size=8,
        time_step_min=1e-30,  # transformers limits steps by it in prompts, not while it decodes
    ),
    "olmo_hybrid": _of(
        "olmo_hybrid",
        **_SQUARE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        rope_parameters=_THETA,
    ),
    "kimi_linear": _of(
        "kimi_linear",
        **_EXPERTS | _LATENT | {"q_lora_rank": None},
        num_local_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_num_heads=4,
        linear_head_dim=32,
    ),
    "ernie4_5": _of("ernie4_5", **_HEADS, use_bias=True, rope_parameters=_THETA),
    "cohere": _of("cohere", **_SQUARE, logit_scale=0.25, rope_parameters=_THETA),
    "cohere with norms of queries and keys": _of("cohere", **_SQUARE, use_qk_norm=True, rope_parameters=_THETA),  # R+
    "cohere2": _of(
        "cohere2", **_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=0.25, rope_parameters=_THETA
    ),
    "gpt_neox": _of("gpt_neox", **_MHA, hidden_size=128, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
    "gpt_neox sequential": _of(
        "gpt_neox",
        **_MHA,
        hidden_size=128,
        use_parallel_residual=False,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "gptj": _of("gptj", **_GPT, n_inner=80, rotary_dim=16, max_position_embeddings=256),
    "falcon": _of("falcon", **_GPT, rope_parameters=_THETA),  # 7B
    "falcon 40b": _of("falcon", **_GPT, **_GROUPED_FALCON),
    "falcon 11b": _of("falcon", **_GPT, **_GROUPED_FALCON, num_ln_in_parallel_attn=1, ffn_hidden_size=80),
    "olmo": _of("olmo", **_SQUARE, clip_qkv=1.5, rope_parameters=_THETA),
    "persimmon": _of("persimmon", **_MHA, hidden_size=128, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
    "apertus": _of("apertus", **_SQUARE, rope_parameters=_LLAMA3),
    "minicpm3": _of("minicpm3", **_LATENT | {"v_head_dim": 20}, rope_parameters=_THETA),
    "afmoe": _of(
        "afmoe",
        **_HEADS | _EXPERTS,
        num_hidden_layers=3,
        num_experts=6,
        num_shared_experts=2,
        route_scale=2.5,
        mup_enabled=True,
        sliding_window=WINDOW,
        layer_types=[*_ALTERNATING, "sliding_attention"],
        rope_parameters=_THETA,
    ),
    "laguna": _of(
        "laguna",
        head_dim=32,
        **_EXPERTS,
        num_experts=6,
        shared_expert_intermediate_size=32,
        moe_routed_scaling_factor=2.5,
        num_attention_heads_per_layer=[4, 6],
        sliding_window=WINDOW,
        layer_types=_ALTERNATING[::-1],
        rope_parameters={
            "full_attention": _YARN | {"partial_rotary_factor": 0.5},
            "sliding_attention": _THETA | {"partial_rotary_factor": 1.0},
        },
    ),
    "laguna with a gate per value": _of(
        "laguna",
        head_dim=32,
        **_EXPERTS,
        num_experts=6,
        shared_expert_intermediate_size=32,
        gating="per-element",
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": _THETA | {"partial_rotary_factor": 0.5}, "sliding_attention": _THETA},
    ),
    "gpt2": _of("gpt2", **_GPT, n_inner=80),
    "gpt_bigcode": _of("gpt_bigcode", **_GPT, n_inner=80),
    "gpt_bigcode with all heads": _of("gpt_bigcode", **_GPT, multi_query=False),
    "opt": _of("opt", **_SQUARE | _GPT, ffn_dim=80, word_embed_proj_dim=128),
    "cohere2_moe": _of(
        "cohere2_moe",
        **_HEADS,
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=2,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        prefix_dense_intermediate_size=56,
        logit_scale=0.25,
        rope_theta=500.0,
    ),
    "cohere2_moe with a sigmoid": _of(
        "cohere2_moe",
        **_HEADS,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    "axk1": _of("axk1", **_EXPERTS | _LATENT | _GROUPS, mlp_layer_types=["dense", "sparse"], rope_parameters=_THETA),
    "phi": _of("phi", hidden_size=128, rope_parameters=_THETA | {"partial_rotary_factor": 0.5}),
}
