"""Configs of published checkpoints whose class transformers lacks, from memory."""

import json

_INTERNLM2 = {
    "architectures": ["InternLM2ForCausalLM"], "attn_implementation": "eager", "bias": False, "bos_token_id": 1,
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
        "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "internlm2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.41.0", "use_cache": True, "vocab_size": 92544,
}  # fmt: skip
_GLM4 = {
    "_name_or_path": "THUDM/glm-4-9b-chat", "architectures": ["ChatGLMModel"], "model_type": "chatglm",
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig", "AutoModel": "modeling_chatglm.ChatGLMModel",
    },
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0,
    "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1.5625e-07, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 32, "num_hidden_layers": 40, "num_layers": 40,
    "rope_ratio": 500, "original_rope": True, "padded_vocab_size": 151552, "post_layer_norm": True, "rmsnorm": True,
    "seq_length": 131072, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.30.2",
    "tie_word_embeddings": False, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329,
}  # fmt: skip
_PANGU = {  # fields of its converted config, which vLLM reads
    "architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 45892, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7680,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 25600000, "routed_scaling_factor": 2.5, "sandwich_norm": True, "tie_word_embeddings": False,
    "v_head_dim": 128, "vocab_size": 153600,
}  # fmt: skip

PUBLISHED = {
    "openPangu-Ultra-MoE-718B": (
        json.dumps(_PANGU),
        lambda spec: not spec.experts.router.correction and spec.norms.after_mlp == "post_mlp_layernorm",
    ),
    "internlm2_5-7b-chat": (
        json.dumps(_INTERNLM2),
        lambda spec: (spec.kv_heads, spec.qkv_bias, spec.rope.theta) == (8, False, 1e6) and spec.max_length == 32768,
    ),
    "internlm-chat-7b": (
        json.dumps({
            "architectures": ["InternLMForCausalLM"], "bias": True, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 2048, "model_type": "internlm", "num_attention_heads": 32,
            "num_hidden_layers": 32, "pad_token_id": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.29.2", "use_cache": True, "vocab_size": 103168,
        }),
        lambda spec: (spec.kv_heads, spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (32, True, True, False),
    ),
    "openPangu-Embedded-7B": (
        json.dumps({
            "architectures": ["PanguEmbeddedForCausalLM"], "attention_dropout": 0.0, "bias": True, "bos_token_id": 1,
            "eos_token_id": 45892, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 12800, "max_position_embeddings": 32768, "model_type": "PanguEmbedded",
            "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "pad_token_id": 0,
            "rms_norm_eps": 1e-05, "rope_theta": 16000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.53.2", "use_cache": True, "vocab_size": 153376,
        }),
        lambda spec: (spec.kv_heads, spec.qkv_bias, spec.out_bias, spec.rope.theta) == (8, True, True, 16e6),
    ),
    "Baichuan2-7B-Chat": (
        json.dumps({
            "_from_model_config": True, "architectures": ["BaichuanForCausalLM"], "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_max_length": 4096,
            "model_type": "baichuan", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0,
            "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.29.2", "use_cache": True, "vocab_size": 125696, "z_loss_weight": 0,
        }),
        lambda spec: spec.normed_head and spec.max_length == 4096,
    ),
    "baichuan-7B": (
        json.dumps({
            "architectures": ["BaiChuanForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "model_type": "baichuan", "num_attention_heads": 32,
            "num_hidden_layers": 32, "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.29.1", "use_cache": True, "vocab_size": 64000,
        }),
        lambda spec: not spec.normed_head,
    ),
    "Qwen-7B-Chat": (
        json.dumps({
            "architectures": ["QWenLMHeadModel"],
            "auto_map": {
                "AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
            },
            "attn_dropout_prob": 0.0, "bf16": False, "emb_dropout_prob": 0.0, "fp16": False, "fp32": False,
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 22016, "kv_channels": 128,
            "layer_norm_epsilon": 1e-06, "max_position_embeddings": 32768, "model_type": "qwen", "no_bias": True,
            "num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": None, "rotary_emb_base": 10000,
            "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192, "softmax_in_fp32": False,
            "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer", "transformers_version": "4.32.0",
            "use_cache": True, "use_cache_kernel": False, "use_cache_quantization": False, "use_dynamic_ntk": True,
            "use_flash_attn": "auto", "use_logn_attn": True, "vocab_size": 151936,
        }),
        lambda spec: (spec.intermediate, spec.max_length, spec.qkv_bias, spec.out_bias) == (11008, 8192, True, False),
    ),
    "glm-4-9b-chat": (
        json.dumps(_GLM4),
        lambda spec: (spec.kv_heads, spec.rope.theta, spec.rope.rotated, spec.vocab) == (2, 5e6, 64, 151552),
    ),
    "EXAONE-3.5-7.8B-Instruct": (
        json.dumps({
            "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_exaone.ExaoneConfig",
                "AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM",
                "AutoModelForSequenceClassification": "modeling_exaone.ExaoneForSequenceClassification",
            },
            "bos_token_id": 1, "embed_dropout": 0.0, "eos_token_id": 361, "head_dim": 128, "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 32768, "model_type": "exaone", "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_layers": 32, "pad_token_id": 0,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 102400,
        }),
        lambda spec: (spec.layers, spec.kv_heads, spec.rope.kind, spec.norm_eps) == (32, 8, "llama3", 1e-5),
    ),
    "TeleChat2-7B": (
        json.dumps({
            "apply_residual_connection_post_layernorm": False, "architectures": ["TeleChat2ForCausalLM"],
            "attention_dropout": 0.0, "base_seqlen": 8192, "bos_token_id": 1, "embed_layernorm": False,
            "eos_token_id": 2, "ffn_hidden_size": 12288, "flash_attn": True, "hidden_dropout": 0.0,
            "hidden_size": 4096, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "logn": False,
            "model_type": "telechat", "n_head": 32, "n_layer": 30, "num_key_value_heads": 32, "pad_token_id": 3,
            "seed": 42, "seq_length": 8192, "skip_bias_add": False, "tie_word_embeddings": False,
            "torch_dtype": "float16", "training_seqlen": 8192, "unk_token_id": 0, "use_cache": True,
            "vocab_size": 131072,
        }),
        lambda spec: (spec.down_bias, spec.mlp_bias, spec.out_bias, spec.qkv_bias) == (True, False, True, False),
    ),
    "Orion-14B-Chat": (
        json.dumps({
            "architectures": ["OrionForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 15360,
            "max_position_embeddings": 4096, "max_sequence_length": 4096, "model_type": "orion",
            "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 40, "pad_token_id": 0,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0",
            "use_cache": True, "vocab_size": 84608,
        }),
        lambda spec: spec.layer_norm and spec.gated and spec.norm_biases,
    ),
    "Tele-FLM": (
        json.dumps({
            "architectures": ["TeleFLMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 8192,
            "initializer_range": 0.02, "input_mult": 1.0, "intermediate_size": 21824,
            "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "teleflm", "mup_scale_factor": 16.0,
            "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 64, "output_mult": 32.0,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "use_mup": True, "vocab_size": 80000,
        }),
        lambda spec: (spec.scales.embedding, spec.scales.logits) == (1.0, 0.5),
    ),
    "stablelm-zephyr-3b": (
        json.dumps({
            "architectures": ["StableLMEpochForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 6912,
            "max_position_embeddings": 4096, "model_type": "stablelm_epoch", "norm_eps": 1e-05,
            "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rope_pct": 0.25, "rope_theta": 10000, "rotary_scaling_factor": 1.0, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.35.2", "use_cache": True, "vocab_size": 50304,
        }),
        lambda spec: (spec.rope.rotated, spec.norm_eps, spec.qkv_bias) == (20, 1e-5, False),
    ),
    "AquilaChat2-7B": (
        json.dumps({
            "architectures": ["AquilaForCausalLM"], "bos_token_id": 100006, "eos_token_id": 100007,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.006, "intermediate_size": 11008,
            "max_position_embeddings": 2048, "model_type": "aquila", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 100008,
        }),
        lambda spec: spec.family == "llama",
    ),
    "llama-7b-hf": (
        json.dumps({
            "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "pad_token_id": -1, "rms_norm_eps": 1e-06, "torch_dtype": "float16",
            "transformers_version": "4.27.0.dev0", "use_cache": True, "vocab_size": 32000,
        }),
        lambda spec: spec.max_length == 2048,
    ),
    "deepseek-moe-16b-chat": (
        json.dumps({
            "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
            "max_position_embeddings": 4096, "model_type": "deepseek", "moe_intermediate_size": 1408,
            "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
            "num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True, "vocab_size": 102400,
        }),
        lambda spec: (spec.experts.count, spec.experts.per_token, spec.experts.shared.intermediate) == (64, 6, 2816)
        and spec.experts.layers[:2] == (False, True)
        and not spec.experts.normalized,
    ),
    "Ling-lite": (
        json.dumps({
            "architectures": ["BailingMoeForCausalLM"], "attention_dropout": 0.0, "embedding_dropout": 0.0,
            "eos_token_id": 126081, "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.006, "intermediate_size": 5632,
            "max_position_embeddings": 16384, "max_window_layers": 28, "model_type": "bailing_moe",
            "moe_intermediate_size": 1408, "norm_head": False, "norm_softmax": False, "norm_topk_prob": True,
            "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "num_shared_experts": 2, "output_dropout": 0.0, "output_router_logits": False,
            "pad_token_id": 126081, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 600000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0", "use_bias": False, "use_cache": True, "use_qkv_bias": False,
            "vocab_size": 126464,
        }),
        lambda spec: spec.experts.normalized and spec.experts.shared.intermediate == 2816 and spec.rope.theta == 6e5,
    ),
}  # fmt: skip
