"""Configs of published checkpoints with experts, beyond those in test_families.py.

Fields are those of public repositories, some of them read in part and completed from the model cards.
"""

import json

from tandemrt.export.read.layer import Experts, Router, SharedExpert

_LLAMA = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
_LLAMA |= {"rope_scaling": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True}
_GLM = _LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "max_position_embeddings": 131072, "model_type": "glm4_moe", "n_group": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 151552,
}  # fmt: skip
_SIGMOID = Router("sigmoid", correction=True, least_sum=1e-20)

_DEEPSEEK = _LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "hidden_size": 7168,
    "intermediate_size": 18432, "rms_norm_eps": 1e-06, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "seq_aux": True, "tie_word_embeddings": False, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096, "type": "yarn"}

_NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": [2, 11], "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_shared_expert_overlap": False, "n_group": 1,
    "n_groups": 8, "n_routed_experts": 512, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_experts_per_tok": 22, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 5.0, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip

_INDEX = {"index_head_dim": 128, "index_topk": 2048}
_GLM5 = _DEEPSEEK | _INDEX | {
    "architectures": ["GlmMoeDsaForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 6144, "index_n_heads": 32,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512, "model_type": "glm_moe_dsa",
    "n_group": 1, "n_routed_experts": 256, "num_attention_heads": 64, "num_hidden_layers": 78,
    "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05, "rope_interleave": True, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip

PUBLISHED = {
    "Ling-mini-2.0": (  # the fields and defaults of its class
        json.dumps({
            "architectures": ["BailingMoeV2ForCausalLM"], "attention_dropout": 0.0,
            "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
            "embedding_dropout": 0.0, "eos_token_id": 156892, "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
            "max_position_embeddings": 32768, "max_window_layers": 20, "model_type": "bailing_moe",
            "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 512, "mtp_loss_scaling_factor": 0, "n_group": 8,
            "norm_head": False, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256,
            "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
            "num_nextn_predict_layers": 0, "num_shared_experts": 1, "output_dropout": 0.0,
            "output_router_logits": False, "pad_token_id": 156892, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000, "routed_scaling_factor": 2.5,
            "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
            "use_bias": False, "use_cache": True, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
            "vocab_size": 157184,
        }),
        lambda spec: (spec.rope.rotated, spec.experts.count, spec.experts.router.groups, spec.qk_norm.query)
        == (64, 256, 8, "query_layernorm"),
    ),
    "DeepSeek-V3.2": (
        json.dumps(_DEEPSEEK | _INDEX | {
            "architectures": ["DeepseekV32ForCausalLM"], "first_k_dense_replace": 3, "index_n_heads": 64,
            "model_type": "deepseek_v32", "n_group": 8, "n_routed_experts": 256, "num_attention_heads": 128,
            "num_key_value_heads": 128, "rope_theta": 10000, "topk_group": 4,
            "rope_scaling": _YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        }),
        lambda spec: spec.max_length == 2048 and (spec.latent.rank, spec.experts.router.groups) == (512, 8),
    ),
    "GLM-5.2": (
        json.dumps(_GLM5 | {
            "head_dim": 192, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3,
            "index_topk_freq": 4, "index_topk_pattern": None, "max_position_embeddings": 1048576,
            "moe_router_dtype": "float32",
        }),
        lambda spec: (spec.max_length, spec.latent.plain, spec.latent.value, spec.head_dim) == (2048, 192, 256, 576),
    ),
    "GLM-5.2 as transformers saves it": (
        json.dumps(_GLM5 | {
            "head_dim": 64, "indexer_types": ["full", "shared"] * 39, "mlp_bias": False,
            "layer_types": ["deepseek_sparse_attention"] * 78, "num_experts": 256, "num_local_experts": 256,
            "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 75], "max_position_embeddings": 1048576,
        }),
        lambda spec: spec.max_length == 2048 and spec.experts.layers == (False,) * 3 + (True,) * 75,
    ),
    "NVIDIA-Nemotron-3-Super-120B-A12B": (
        json.dumps(_NEMOTRON | {
            "hidden_size": 4096, "hybrid_override_pattern": "MEMEMEM*E", "intermediate_size": 2688,
            "keep_mtp_spec_in_bf16": True, "mamba_num_heads": 128, "moe_intermediate_size": 2688,
            "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "mtp_hybrid_override_pattern": "*E",
            "num_attention_heads": 32, "num_hidden_layers": 9,
        }),
        lambda spec: (spec.layers, spec.experts.latent, spec.experts.shared) == (5, 1024, SharedExpert(5376)),
    ),
    "NVIDIA-Nemotron-3-Ultra": (
        json.dumps(_NEMOTRON | {
            "hidden_size": 8192, "intermediate_size": 5120, "mamba_num_heads": 256, "moe_intermediate_size": 5120,
            "layers_block_type": ["mamba", "moe", "mamba", "moe", "mamba", "moe", "mamba", "attention", "moe"],
            "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240, "num_attention_heads": 64,
            "mtp_layers_block_type": ["attention", "moe"], "num_hidden_layers": None,
        }),
        lambda spec: (spec.experts.latent, spec.experts.layers) == (2048, (True, True, True, False, True)),
    ),
    "DeepSeek-V2-Lite-Chat": (
        json.dumps(_DEEPSEEK | {
            "architectures": ["DeepseekV2ForCausalLM"], "bos_token_id": 100000, "eos_token_id": 100001,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config",
                         "AutoModel": "modeling_deepseek.DeepseekV2Model",
                         "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
            "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "num_nextn_predict_layers": None, "q_lora_rank": None, "rope_theta": 10000,
            "rope_scaling": _YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
            "vocab_size": 102400,
        }),
        lambda spec: (spec.latent.query_rank, spec.head_dim, spec.kv_heads, spec.experts.router)
        == (None, 576, 1, Router()) and abs(spec.scales.attention - 192**-0.5 * 1.2608**2) < 1e-5,
    ),
    "DeepSeek-V3": (
        json.dumps(_DEEPSEEK | {
            "first_k_dense_replace": 3, "n_group": 8, "n_routed_experts": 256, "num_attention_heads": 128,
            "num_key_value_heads": 128, "rope_theta": 10000, "topk_group": 4,
            "rope_scaling": _YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                    "weight_block_size": [128, 128]},
        }),
        lambda spec: spec.experts.router == Router("sigmoid", True, 8, 4, least_sum=1e-20, scale=2.5)
        and spec.max_length == 163840,
    ),
    "Kimi-K2-Instruct": (
        json.dumps(_DEEPSEEK | {
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
            "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1,
            "rope_scaling": _YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "vocab_size": 163840,
        }),
        lambda spec: (spec.experts.count, spec.experts.router.groups, spec.family) == (384, 1, "deepseek_v3"),
    ),
    "GLM-4.7-Flash": (
        json.dumps(_DEEPSEEK | {
            "architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
            "intermediate_size": 10240, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
            "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "num_attention_heads": 20,
            "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "partial_rotary_factor": 1.0,
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
            "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880,
        }),
        lambda spec: (spec.latent.plain, spec.latent.value, sum(spec.experts.layers)) == (192, 256, 46),
    ),
    "GLM-4.6": (
        json.dumps(_GLM | {
            "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_hidden_layers": 92, "use_qk_norm": True,
            "max_position_embeddings": 202752,
        }),
        lambda spec: spec.qk_norm is not None
        and (spec.qkv_bias, spec.out_bias, spec.rope.rotated, sum(spec.experts.layers)) == (True, False, 64, 89)
        and spec.experts.router == Router("sigmoid", True, least_sum=1e-20, scale=2.5)
        and spec.experts.shared == SharedExpert(1536),
    ),
    "GLM-4.5-Air": (
        json.dumps(_GLM | {
            "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
            "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "num_hidden_layers": 46, "use_qk_norm": False,
        }),
        lambda spec: (spec.qk_norm, spec.experts.count, spec.experts.router) == (None, 128, _SIGMOID),
    ),
    "MiniMax-M2": (
        json.dumps({
            "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
            "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
                         "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
            "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
            "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
            "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
            "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                    "weight_block_size": [128, 128],
                                    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
            "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
            "shared_intermediate_size": 0, "tie_word_embeddings": False, "transformers_version": "4.46.1",
            "use_cache": True, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
        }),
        lambda spec: (spec.rope.rotated, spec.rope.theta, spec.qk_norm.over_all_heads) == (64, 5e6, True)
        and spec.experts == Experts(256, 8, 1536, True, (True,) * 62, router=_SIGMOID),
    ),
    "ERNIE-4.5-21B-A3B-PT": (
        json.dumps({
            "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
            "model_type": "ernie4_5_moe", "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27,
            "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
            "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "vocab_size": 103424,
        }),
        lambda spec: (spec.rope.interleaved, spec.experts.shared, sum(spec.experts.layers))
        == (True, SharedExpert(3072), 27) and spec.experts.router == Router(correction=True, least_sum=1e-12),
    ),
    "Qwen1.5-MoE-A2.7B-Chat": (
        json.dumps({
            "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
            "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
            "vocab_size": 151936,
        }),
        lambda spec: spec.qkv_bias and spec.experts == Experts(
            60, 4, 1408, False, (True,) * 24, shared=SharedExpert(5632, "shared_expert", "shared_expert_gate")
        ),
    ),
    "OLMoE-1B-7B-0924": (
        json.dumps(_LLAMA | {
            "architectures": ["OlmoeForCausalLM"], "clip_qkv": None, "eos_token_id": 50279, "hidden_size": 2048,
            "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
            "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
        }),
        lambda spec: (spec.qk_norm.over_all_heads, spec.experts) == (True, Experts(64, 8, 1024, False, (True,) * 16)),
    ),
    "granite-3.1-3b-a800m-instruct": (
        json.dumps(_LLAMA | {
            "architectures": ["GraniteMoeForCausalLM"], "attention_multiplier": 0.015625, "bos_token_id": 0,
            "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 1536, "intermediate_size": 512,
            "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
            "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 40, "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-06, "rope_theta": 10000000.0, "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": True, "vocab_size": 49155,
        }),
        lambda spec: (spec.scales.residual, spec.experts) == (0.22, Experts(40, 8, 512, True, (True,) * 32)),
    ),
    "dots.llm1.inst": (
        json.dumps(_LLAMA | {
            "architectures": ["Dots1ForCausalLM"], "eos_token_id": 151649, "first_k_dense_replace": 1,
            "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768,
            "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
            "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 152064,
        }),
        lambda spec: (spec.experts.shared, spec.experts.router.scale) == (SharedExpert(2816), 2.5),
    ),
}  # fmt: skip
