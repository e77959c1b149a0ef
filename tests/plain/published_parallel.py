"""Configs of published checkpoints whose attention and MLP read the same stream, from memory."""

import json

PUBLISHED = {
    "c4ai-command-r7b-12-2024": (
        json.dumps({
            "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
            "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
            "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
            "transformers_version": "4.48.0.dev0", "use_cache": True, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
            "vocab_size": 256000,
        }),
        lambda spec: (spec.scales.logits, spec.tied, spec.norms.parallel) == (4.0, True, True)
        and [spec.rope_of(at) is None for at in range(4)] == [False, False, False, True],
    ),
    "aya-expanse-8b": (
        json.dumps({
            "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.125,
            "max_position_embeddings": 8192, "model_type": "cohere", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 10000,
            "torch_dtype": "float16", "transformers_version": "4.44.0", "use_cache": True, "use_qk_norm": False,
            "vocab_size": 256000,
        }),
        lambda spec: spec.layer_norm and not spec.norm_biases and spec.rope.interleaved and spec.scales.logits == 8.0,
    ),
    "pythia-1.4b": (
        json.dumps({
            "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 16,
            "num_hidden_layers": 24, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
            "use_parallel_residual": True, "vocab_size": 50304,
        }),
        lambda spec: (spec.rope.rotated, spec.kv_heads, spec.activation) == (32, 16, "gelu")
        and spec.norms.before_mlp == "post_attention_layernorm",
    ),
    "gpt-j-6b": (
        json.dumps({
            "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
            "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096,
            "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True,
            "rotary_dim": 64, "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
            "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
            "use_cache": True, "vocab_size": 50400,
        }),
        lambda spec: (spec.intermediate, spec.rope.rotated, spec.head_bias, spec.qkv_bias) == (16384, 64, True, False),
    ),
    "falcon-7b-instruct": (
        json.dumps({
            "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
            "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
            "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
            "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
            "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
        }),
        lambda spec: (spec.kv_heads, spec.intermediate, spec.norms.before_mlp) == (1, 18176, None),
    ),
    "falcon-40b, as it was published first": (
        json.dumps({
            "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["RWForCausalLM"],
            "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
            "hidden_size": 8192, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60,
            "new_decoder_architecture": True, "parallel_attn": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
        }),
        lambda spec: (spec.heads, spec.kv_heads, spec.layers, spec.norms.before_mlp) == (128, 8, 60, "ln_mlp"),
    ),
    "phi-2": (
        json.dumps({
            "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
            "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
            "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
            "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
            "transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51200,
        }),
        lambda spec: (spec.rope.rotated, spec.head_bias, spec.out_bias) == (32, True, True),
    ),
}  # fmt: skip
