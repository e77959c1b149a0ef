"""The supported model families, one row each.

The config provides everything else (export/read/spec.py), so the only code of a family reads fields that other
families do not have.
"""

from collections.abc import Mapping
from typing import Any

from tandemrt.export.read import experts
from tandemrt.export.read import family as of
from tandemrt.export.read.family import Family
from tandemrt.export.read.layer import Activation, NormNames, QKNorm
from tandemrt.export.read.layer_kinds import (
    all_layers_window,
    alternating_windows,
    configured_window,
    hybrid_window,
    listed_full_attention,
    listed_rotary,
    sliding_rotary,
    uniform_window,
)
from tandemrt.export.read.recurrent import delta_net, joined_delta_net
from tandemrt.export.read.rope import RopeRules

_NORMS_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GLM_NORMS = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GELU: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_TRAINING = ("residual_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp")  # transformers never reads the last one

_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")  # states are always float32
_ROUTER = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training only
_DEEPSEEK = (
    *_ROUTER,
    "pretraining_tp",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "num_mtp_layers",
)  # training, placement, MTP
_HUNYUAN_VALUES: dict[str, tuple[Any, ...]] = {
    "add_classification_head": (False,),
    "norm_type": ("rms",),
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
_HUNYUAN_UNUSED = (
    *_TRAINING,
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "org_vocab_size"),
    *("pad_id", "pool_type", "mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "sep_token_id"),
)
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_ROWS = (
    Family("llama", ("LlamaForCausalLM",), biases=of.named_biases, no_effect_values={"pretraining_tp": (1,)}),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        defaults={"sliding_window": 4096},  # the default of transformers; null disables the window
        windows=uniform_window,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), biases=of.qkv_biases, windows=configured_window),
    Family("mimo", ("MiMoForCausalLM",), biases=of.qkv_biases, windows=configured_window),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        defaults={"head_dim": 128},
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=configured_window,
    ),
    Family(
        "ministral3",
        ("Ministral3ForCausalLM",),
        defaults={"head_dim": 128},
        windows=uniform_window,
        rope=RopeRules(default=_MINISTRAL_ROPE),
    ),
    Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        defaults={"head_dim": 128},
        biases=of.seed_biases,
        unused_fields=_TRAINING,
    ),
    Family("granite", ("GraniteForCausalLM",), biases=of.named_biases, scales=of.granite_scales),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        windows=uniform_window,
        rope=RopeRules(partial=1.0),
        no_effect_values={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        unused_fields=(*_TRAINING, "original_max_position_embeddings"),  # read by longrope
    ),
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        defaults={"tie_word_embeddings": True},
        biases=of.named_biases,
        rotary=listed_rotary,
        rope=RopeRules(default={"rope_theta": 2_000_000.0}),
        unused_fields=_TRAINING,
    ),
    Family(
        "arcee",
        ("ArceeForCausalLM",),
        biases=of.named_biases,
        activations={"relu2": "relu2"},
        gated=False,
    ),
    Family(
        "cwm",
        ("CwmForCausalLM",),
        defaults={"head_dim": 128, "sliding_window": 8192},
        biases=of.mlp_bias,
        windows=alternating_windows(4, full=0),
        rope=RopeRules(default=_CWM_ROPE),
        unused_fields=_TRAINING,
    ),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        norms=_NORMS_AFTER,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
    ),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        defaults={"sliding_window": 4096},
        norms=_NORMS_AFTER,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        windows=alternating_windows(4),
        rope=RopeRules(default={"rope_theta": 500_000.0}, local_theta=("rope_theta", 500_000.0)),
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norms=_NORMS_AROUND,
        norm_offset=True,
        biases=of.attention_biases,
        windows=alternating_windows(2),
        scales=of.gemma_scales,
        activations=_GELU,
        activation_field="hidden_activation",
        no_effect_values={"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        unused_fields=("sliding_window_size",),  # the old name of sliding_window
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        defaults=_GEMMA | {"max_position_embeddings": 131_072, "vocab_size": 262_208},
        norms=_NORMS_AROUND,
        norm_offset=True,
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=alternating_windows(6, named="sliding_window_pattern"),
        rope=RopeRules(default={"rope_theta": 1_000_000.0}, local_theta=("rope_local_base_freq", 10_000.0)),
        scales=of.gemma_scales,
        activations=_GELU,
        activation_field="hidden_activation",
        no_effect_values={"use_bidirectional_attention": (False,)},
    ),
    Family(
        "glm4",
        ("Glm4ForCausalLM",),
        defaults={"head_dim": 128},
        norms=_GLM_NORMS,
        biases=of.glm_biases,
        rope=RopeRules(partial=0.5, interleaved=True),
    ),
    Family(
        "exaone4",
        ("Exaone4ForCausalLM",),
        defaults={"sliding_window": 4096},
        norms=_NORMS_AFTER,
        qk_norm=QKNorm(),
        windows=alternating_windows(4, named="sliding_window_pattern"),
        rotary=sliding_rotary,
    ),
    Family(
        "hunyuan_v1_dense",
        ("HunYuanDenseV1ForCausalLM",),
        qk_norm=QKNorm("query_layernorm", "key_layernorm", after_rotary=True),
        biases=of.attention_biases,
        no_effect_values=_HUNYUAN_VALUES,
        unused_fields=_HUNYUAN_UNUSED,
    ),
    Family(
        "ernie4_5",
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        defaults={"head_dim": 128, "tie_word_embeddings": True},
        biases=of.one_bias,
        rope=RopeRules(default={"rope_theta": 500_000.0}, interleaved=True),
    ),
    Family(
        "qwen3_5_text",
        ("Qwen3_5ForCausalLM",),
        defaults={"head_dim": 256},
        norm_offset=True,
        qk_norm=QKNorm(),
        gated_attention=True,
        recurrent=delta_net,
        windows=hybrid_window,
        rope=RopeRules(partial=0.25),
        no_effect_values={"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")},
        unused_fields=_MTP,
    ),
    Family(
        "qwen3_5_moe_text",
        ("Qwen3_5MoeForCausalLM",),
        # Every layer has experts, so configs have no intermediate_size; their weights are always normalized.
        defaults={"head_dim": 256, "intermediate_size": 512, "norm_topk_prob": True},
        norm_offset=True,
        qk_norm=QKNorm(),
        gated_attention=True,
        recurrent=delta_net,
        windows=hybrid_window,
        rope=RopeRules(partial=0.25),
        no_effect_values={"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")},
        unused_fields=(*_MTP, *_ROUTER),
        experts=experts.qwen2_experts,
    ),
    Family(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        defaults={"head_dim": 256, "norm_topk_prob": True},
        norm_offset=True,
        qk_norm=QKNorm(),
        gated_attention=True,
        recurrent=joined_delta_net,
        windows=hybrid_window,
        rope=RopeRules(partial=0.25),
        unused_fields=(*_MTP, *_ROUTER),
        experts=experts.qwen2_experts,
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        windows=uniform_window,
        rope=RopeRules(default={"rope_theta": 1_000_000.0}),
        unused_fields=_ROUTER,
        experts=experts.mixtral_experts,
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=all_layers_window,
        no_effect_values={"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
        unused_fields=_ROUTER,
        experts=experts.qwen_experts,
    ),
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "attention_bias": True},
        sinks=True,
        biases=of.attention_biases,
        windows=alternating_windows(2),
        rope=RopeRules(default=_GPT_OSS_ROPE),
        unused_fields=(*_ROUTER, "initial_context_length"),  # given by rope_scaling too
        experts=experts.gpt_oss_experts,
    ),
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        biases=of.configured_qkv_bias,
        windows=all_layers_window,
        unused_fields=_ROUTER,
        experts=experts.qwen2_experts,
    ),
    Family(
        "olmoe",
        ("OlmoeForCausalLM",),
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        no_effect_values={"clip_qkv": (None,)},
        unused_fields=_ROUTER,
        experts=experts.olmoe_experts,
    ),
    Family(
        "flex_olmo",
        ("FlexOlmoForCausalLM",),
        norms=_NORMS_AFTER,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        rope=RopeRules(default={"rope_theta": 500_000.0}),
        unused_fields=_ROUTER,
        experts=experts.olmoe_experts,
    ),
    Family(
        "granitemoe",
        ("GraniteMoeForCausalLM",),
        biases=of.attention_biases,
        scales=of.granite_scales,
        unused_fields=_ROUTER,
        experts=experts.granite_experts,
    ),
    Family(
        "granitemoeshared",
        ("GraniteMoeSharedForCausalLM",),
        biases=of.attention_biases,
        scales=of.granite_scales,
        unused_fields=_ROUTER,
        experts=experts.granite_experts,
    ),
    Family(
        "ernie4_5_moe",
        ("Ernie4_5_MoeForCausalLM",),
        defaults={"tie_word_embeddings": True},
        no_effect_values={"use_bias": (False,)},
        rope=RopeRules(default={"rope_theta": 500_000.0}, interleaved=True),
        unused_fields=_ROUTER,
        experts=experts.ernie_experts,
    ),
    Family(
        "hunyuan_v1_moe",
        ("HunYuanMoEV1ForCausalLM",),
        qk_norm=QKNorm("query_layernorm", "key_layernorm", after_rotary=True),
        biases=of.attention_biases,
        no_effect_values=_HUNYUAN_VALUES
        | {"use_mixed_mlp_moe": (True,), "moe_drop_tokens": (False,), "norm_topk_prob": (True,)},
        unused_fields=(
            *_HUNYUAN_UNUSED,
            *_ROUTER,
            *("capacity_factor", "moe_layer_num_skipped", "moe_random_routing_dropped_token", "group_limited_greedy"),
        ),
        experts=experts.hunyuan_experts,
    ),
    Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        defaults={"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8},
        qk_norm=QKNorm(),
        qk_norm_flag="use_qk_norm",
        biases=of.qkv_biases_if_configured,
        rope=RopeRules(partial=0.5),
        unused_fields=_DEEPSEEK,
        experts=experts.deepseek_experts(),
    ),
    Family(
        "solar_open",
        ("SolarOpenForCausalLM",),
        defaults={
            "head_dim": 128,
            "intermediate_size": 10_240,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
        },
        biases=of.qkv_biases_if_configured,
        rope=RopeRules(default={"rope_theta": 1_000_000.0}, partial=1.0),
        no_effect_values={"use_qk_norm": (False,)},
        unused_fields=_DEEPSEEK,
        experts=experts.deepseek_experts(),
    ),
    Family(
        "dots1",
        ("Dots1ForCausalLM",),
        defaults={"sliding_window": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=configured_window,
        unused_fields=_DEEPSEEK,
        experts=experts.deepseek_experts(),
    ),
    Family(
        "exaone_moe",
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        defaults={
            "sliding_window": 4096,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        qk_norm=QKNorm(),
        windows=alternating_windows(4, named="sliding_window_pattern"),
        rotary=sliding_rotary,
        unused_fields=_DEEPSEEK,
        experts=experts.deepseek_experts(count="num_experts", shared="num_shared_experts"),
    ),
    Family(
        "hy_v3",
        ("HYV3ForCausalLM",),
        defaults={
            "head_dim": 128,
            "router_scaling_factor": 2.826,
            "moe_intermediate_size": 1536,
            "num_experts": 192,
            "num_experts_per_tok": 8,
        },
        qk_norm=QKNorm(),
        biases=of.named_biases,
        rope=RopeRules(default={"rope_theta": 11_158_840.0}),
        no_effect_values={"enable_moe_fp32_combine": (True, False), "route_norm": (True,), "qk_norm": (True,)},
        unused_fields=_DEEPSEEK,
        experts=experts.deepseek_experts(
            count="num_experts", shared="num_shared_experts", scale="router_scaling_factor", stored="shared_mlp"
        ),
    ),
    Family(
        "minimax_m2",
        ("MiniMaxM2ForCausalLM",),
        defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
        qk_norm=QKNorm(over_all_heads=True),
        windows=listed_full_attention,
        rope=RopeRules(default={"rope_theta": 5_000_000.0}, partial=1.0, rotated_field="rotary_dim"),
        no_effect_values={"use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
        unused_fields=(
            *_ROUTER,
            *("mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
            *(f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")),
        ),
        experts=experts.minimax_experts,
    ),
)
FAMILIES = {architecture: row for row in _ROWS for architecture in row.architectures}
