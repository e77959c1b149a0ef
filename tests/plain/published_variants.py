"""Configs of published checkpoints whose layers differ in shape, with all fields that were seen, from memory."""

import json

from tandemrt.export.read.layer import Heads, LayerInputs, Router, SharedExpert

_FIVE_OF_SIX = [*["sliding_attention"] * 5, "full_attention"]
_GEMMA4_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma4_text",
    "pad_token_id": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
_GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_id": 258883,
    "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
    "initializer_range": 0.02, "tie_word_embeddings": True, "transformers_version": "5.5.0.dev0",
    "video_token_id": 258884, "vision_config": {"model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 280,
}  # fmt: skip


def _gemma4(**text: object) -> str:
    return json.dumps({**_GEMMA4, "text_config": _GEMMA4_TEXT | text})


PUBLISHED = {
    "starcoder": (
        json.dumps({
            "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"],
            "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1,
            "eos_token_id": 0, "inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True,
            "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192,
            "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
            "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "torch_dtype": "float32", "transformers_version": "4.28.1", "use_cache": True,
            "validate_runner_input": True, "vocab_size": 49152,
        }),
        lambda spec: (spec.kv_heads, spec.max_length, spec.position_offset, spec.activation) == (1, 8192, 0, "gelu")
        and not any(spec.rotary_layers),
    ),
    "gpt2": (
        json.dumps({
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        }),
        lambda spec: (spec.intermediate, spec.kv_heads, spec.tied, spec.max_length) == (3072, 12, True, 1024),
    ),
    "opt-1.3b": (
        json.dumps({
            "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
            "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
            "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 8192, "hidden_size": 2048,
            "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
            "num_attention_heads": 32, "num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>",
            "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 50272,
            "word_embed_proj_dim": 2048,
        }),
        lambda spec: (spec.intermediate, spec.position_offset, spec.activation, spec.tied) == (8192, 2, "relu", True),
    ),
    "Apertus-8B-Instruct-2509": (
        json.dumps({
            "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": [68, 72, 2], "hidden_act": "xielu", "hidden_dropout": 0.0,
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 21504,
            "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 3, "post_norm": False,
            "qk_norm": True, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3",
            },
            "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 131072,
        }),
        lambda spec: (spec.activation, spec.gated, spec.rope.kind) == ("xielu", False, "llama3"),
    ),
    "OLMo-7B-0724-hf": (
        json.dumps({
            "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": 8.0, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
            "model_type": "olmo", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 50304,
        }),
        lambda spec: (spec.scales.qkv_bound, spec.norm_weights, spec.norm_eps) == (8.0, False, 1e-5),
    ),
    "MiniCPM3-4B": (
        json.dumps({
            "architectures": ["MiniCPM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM"}, "bos_token_id": 1,
            "dim_model_base": 256, "eos_token_id": [2, 73440], "hidden_act": "silu", "hidden_size": 2560,
            "initializer_range": 0.1, "intermediate_size": 6400, "kv_lora_rank": 256,
            "max_position_embeddings": 32768, "model_type": "minicpm3", "num_attention_heads": 40,
            "num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "type": "longrope", "original_max_position_embeddings": 32768,
                "long_factor": [1.0 + i for i in range(16)], "short_factor": [1.0] * 16,
            },
            "scale_depth": 1.4, "scale_emb": 12, "torch_dtype": "bfloat16", "transformers_version": "4.41.0",
            "use_cache": True, "vocab_size": 73448,
        }),
        lambda spec: (spec.latent.rank, spec.latent.value, spec.scales.logits) == (256, 64, 10.0) and spec.tied,
    ),
    "Trinity-Nano-Preview": (
        json.dumps({
            "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 3,
            "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02, "intermediate_size": 3072, "layer_types": [
                *["sliding_attention"] * 3, "full_attention",
            ] * 14,
            "load_balance_coeff": 0.0005, "max_position_embeddings": 131072, "model_type": "afmoe",
            "moe_intermediate_size": 256, "mup_enabled": True, "n_group": 1, "num_attention_heads": 8,
            "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 56, "num_key_value_heads": 2, "num_limited_groups": 1, "num_shared_experts": 1,
            "pad_token_id": 12, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
            "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
            "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_grouped_mm": True,
            "vocab_size": 200192,
        }),
        lambda spec: (spec.experts.router.scale, spec.scales.embedding, spec.variants.gate.per_value)
        == (2.826, 32.0, True)
        and spec.rope_of(3) is None,
    ),
    "LFM3-1.7B": (  # the fields of its class in transformers
        json.dumps({
            "architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 124894, "conv_L_cache": 7, "conv_bias": False, "eos_token_id": 124900, "head_dim": 128,
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7680,
            "max_position_embeddings": 128000, "model_type": "lfm3", "norm_eps": 1e-05, "num_attention_heads": 16,
            "num_hidden_layers": 24, "num_key_value_heads": 4, "pad_token_id": 124893,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True, "use_cache": True,
            "use_sandwich_norm": True, "vocab_size": 128000,
        }),
        lambda spec: (spec.recurrent.kernel, spec.recurrent.layers[:5]) == (7, (True, True, False, True, False))
        and [spec.window_of(layer) for layer in (2, 4)] == [None, 256] and spec.variants.gate is not None
        and [(rope.kind, rope.theta) for rope in (spec.rope, spec.local_rope)] == [
            ("proportional", 1e6), ("default", 1e4)
        ],
    ),
    "gemma-4-E2B-it": (
        _gemma4(
            attention_k_eq_v=False, enable_moe_block=False, hidden_size=1536, hidden_size_per_layer_input=256,
            intermediate_size=6144, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
            max_position_embeddings=131072, moe_intermediate_size=None, num_attention_heads=8, num_experts=None,
            num_global_key_value_heads=None, num_hidden_layers=35, num_key_value_heads=1, num_kv_shared_layers=20,
            sliding_window=512, top_k_experts=None, use_bidirectional_attention=None, use_double_wide_mlp=True,
        ),
        lambda spec: [spec.heads_of(layer) for layer in (0, 4)] == [Heads(8, 1, 256), Heads(8, 1, 512)]
        and [spec.cache_of(layer) for layer in (14, 15, 19, 34)] == [14, 13, 14, 14]
        and [spec.intermediate_of(layer) for layer in (14, 15)] == [6144, 12288]
        and spec.variants.inputs == LayerInputs(256, 262144, 0)
        and [spec.rope_of(layer).rotated for layer in (0, 4)] == [256, 512],
    ),
    "gemma-4-31B-it": (
        _gemma4(
            attention_k_eq_v=True, enable_moe_block=False, hidden_size=5376, hidden_size_per_layer_input=0,
            intermediate_size=21504, layer_types=_FIVE_OF_SIX * 10, max_position_embeddings=262144,
            num_attention_heads=32, num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16,
            num_kv_shared_layers=0, sliding_window=1024, use_bidirectional_attention="vision",
            use_double_wide_mlp=False,
        ),
        lambda spec: [spec.heads_of(layer) for layer in (0, 5)] == [Heads(32, 16, 256), Heads(32, 4, 512)]
        and spec.variants.values_are_keys and spec.variants.inputs is None and spec.window_of(0) == 1024,
    ),
    "gemma-4-26B-A4B-it": (
        _gemma4(
            attention_k_eq_v=True, enable_moe_block=True, hidden_size=2816, hidden_size_per_layer_input=0,
            intermediate_size=2112, layer_types=_FIVE_OF_SIX * 5, max_position_embeddings=262144,
            moe_intermediate_size=704, num_attention_heads=16, num_experts=128, num_global_key_value_heads=2,
            num_hidden_layers=30, num_key_value_heads=8, num_kv_shared_layers=0, sliding_window=1024,
            top_k_experts=8, use_bidirectional_attention="vision", use_double_wide_mlp=False,
        ),
        lambda spec: (spec.experts.count, spec.experts.per_token, spec.experts.intermediate) == (128, 8, 704)
        and spec.experts.shared.intermediate == 2112 and spec.heads_of(5) == Heads(16, 2, 512),
    ),
    "Phi-3.5-MoE-instruct": (
        json.dumps({
            "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "auto_map": {
                "AutoConfig": "configuration_phimoe.PhiMoEConfig",
                "AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
            "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu", "hidden_dropout": 0.0,
            "hidden_size": 4096, "initializer_range": 0.02, "input_jitter_noise": 0.01, "intermediate_size": 6400,
            "lm_head_bias": True, "max_position_embeddings": 131072, "model_type": "phimoe",
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 16, "original_max_position_embeddings": 4096, "output_router_logits": False,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
            "rope_scaling": {"long_factor": [1.5] * 64, "long_mscale": 1.243163121016122, "type": "longrope",
                             "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
                             "short_mscale": 1.243163121016122},
            "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.3", "use_cache": True, "vocab_size": 32064,
        }),
        lambda spec: spec.experts.router == Router("sparsemixer", jitter=0.01) and spec.layer_norm and spec.head_bias
        and spec.rope.magnitude == 1.243163121016122,
    ),
    "Llama-4-Scout-17B-16E-Instruct": (
        json.dumps({
            "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "model_type": "llama4",
            "eoi_token_index": 200081, "image_token_index": 200092, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0", "vision_config": {},
            "text_config": {
                "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
                "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 200000,
                "cache_implementation": "static", "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192,
                "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
                "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40,
                "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
                "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
                "use_cache": True, "use_qk_norm": True, "vocab_size": 202048},
        }),
        lambda spec: spec.max_length == 8192 and spec.experts.shared == SharedExpert(8192, "shared_expert")
        and (spec.rope_of(2).interleaved, spec.rope_of(3)) == (True, None) and spec.scales.query_beta == 0.1,
    ),
    "Step-3.5-Flash": (
        json.dumps({
            "architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA", "attention_other_setting": {
                "attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
                "num_attention_heads": 96, "true_head_dim": 128},
            "auto_map": {"AutoConfig": "configuration_step3p5.Step3p5Config",
                         "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11264, "max_position_embeddings": 262144,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12, "max_seq_len": 262144,
            "model_type": "step3p5", "moe_every_n_layer": 1, "moe_intermediate_size": 1280, "moe_layer_offset": 0,
            "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
            "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "need_fp32_gate": True,
            "norm_expert_weight": True, "num_attention_groups": 8, "num_attention_heads": 64,
            "num_hidden_layers": 45, "num_nextn_predict_layers": 3,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "rms_norm_eps": 1e-5,
            "rope_scaling": {"factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 131072, "rope_type": "llama3"},
            "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12, "share_expert_dim": 1280, "sink": False,
            "sliding_window": 512, "swiglu_limits": [*[0.0] * 43, 7.0, 7.0, *[0.0] * 3],
            "swiglu_limits_shared": [*[0.0] * 44, 16.0, *[0.0] * 3], "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True,
            "use_qk_norm": True, "use_rope_layers": [], "vocab_size": 128896, "yarn_only_types": ["full_attention"],
            "zero_centered": True,
        }),
        lambda spec: [spec.heads_of(layer).query for layer in (0, 1)] == [64, 96] and spec.window_of(1) == 512
        and [spec.rope_of(layer).rotated for layer in (0, 1)] == [64, 128] and spec.experts.layers[:4].count(True) == 1
        and [(rope.kind, rope.theta) for rope in (spec.rope, spec.local_rope)] == [("llama3", 5e6), ("default", 1e4)]
        and [spec.experts_of(layer).clamped is None for layer in (42, 43, 44)] == [True, False, False]
        and [clamp and clamp.limit for clamp in map(spec.mlp_clamp_of, (43, 44))] == [None, 16.0],
    ),
    "MiMo-V2-Flash": (
        json.dumps({
            "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False,
            "architectures": ["MiMoV2FlashForCausalLM"], "attention_chunk_size": 128, "attention_dropout": 0.0,
            "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu", "hidden_size": 4096,
            "auto_map": {"AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM"},
            "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] * 8, "initializer_range": 0.02,
            "intermediate_size": 16384, "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144,
            "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048, "moe_layer_freq": [0, *[1] * 47],
            "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None,
            "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192,
            "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000,
            "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 152576,
        }),
        lambda spec: [spec.heads_of(layer).kv for layer in (0, 1)] == [4, 8] and spec.window_of(1) == 129
        and [spec.rope_of(layer).rotated for layer in (0, 1)] == [64, 64] and spec.experts.layers[:2] == (False, True)
        and [spec.sinks_of(layer) for layer in (0, 1)] == [False, True] and spec.variants.value_dim == 128,
    ),
}  # fmt: skip
