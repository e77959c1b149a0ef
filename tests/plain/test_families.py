"""Configs of published checkpoints, family by family: every field is accepted, and read as transformers reads it."""

import dataclasses
import json
import math

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.plan import plan
from tandemrt.export.read.families import renamed
from tandemrt.export.read.families.registry import FAMILIES
from tandemrt.export.read.layer import ClampedSwiglu, Experts, Skip
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision_language import VISION_LANGUAGE, text_config, vision_language
from tests.plain.published_experts import PUBLISHED as PUBLISHED_EXPERTS
from tests.plain.published_parallel import PUBLISHED as PUBLISHED_PARALLEL
from tests.plain.published_renamed import PUBLISHED as PUBLISHED_RENAMED
from tests.plain.published_variants import PUBLISHED as PUBLISHED_VARIANTS

_LONG = {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_EXAONE = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
# Copied from public repositories, long lists shortened; those with VL or 4.1V, SmolLM3's, those of LFM2, Granite
# 4, Bamba, Falcon-H1, Nemotron-H, OLMo Hybrid, Kimi Linear, Gemma 1, GLM-4-9B, StarCoder2, StableLM 2 and
# Nemotron-Mini, and parts of Phi-4-mini's and OLMo-3's from memory.
# Each comes with a check of its spec.
PUBLISHED = {
    "MiniCPM4-8B": (  # from memory, the lists of factors shortened
        json.dumps({
            "architectures": ["MiniCPMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}, "bos_token_id": 1,
            "dim_model_base": 256, "eos_token_id": [2, 73440], "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.1, "intermediate_size": 16384, "max_position_embeddings": 32768,
            "model_type": "minicpm", "mup_denominator": 32, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 2, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "rope_type": "longrope", "original_max_position_embeddings": 32768,
                "long_factor": [1.0 + i for i in range(64)], "short_factor": [1.0] * 64,
            },
            "rope_theta": 10000.0, "scale_depth": 1.4, "scale_emb": 12, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": True, "vocab_size": 73448,
        }),
        lambda spec: (spec.scales.embedding, spec.scales.logits) == (12.0, 16.0) and spec.rope.kind == "longrope",
    ),
    "gemma-2b-it": (
        """{"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 2,
        "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": null, "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "transformers_version": "4.38.0.dev0", "use_cache": true, "vocab_size": 256000}""",
        lambda spec: spec.activation == "gelu_tanh" and spec.tied and spec.scales.embedding == 2048**0.5,
    ),
    "glm-4-9b-chat-hf": (
        """{"architectures": ["GlmForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 131072, "model_type": "glm",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.46.0.dev0", "use_cache": true, "vocab_size": 151552}""",
        lambda spec: spec.rope.rotated == 64 and spec.rope.interleaved and not spec.norms.after_mlp,
    ),
    "starcoder2-3b": (
        """{"activation_function": "gelu_pytorch_tanh", "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
        "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
        "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
        "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "transformers_version": "4.37.0.dev0", "use_bias": true, "use_cache": true, "vocab_size": 49152}""",
        lambda spec: spec.layer_norm and not spec.gated and spec.tied and spec.sliding_window == 4096,
    ),
    "stablelm-2-1_6b-chat": (
        """{"architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "model_type": "stablelm",
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
        "rope_theta": 10000, "tie_word_embeddings": false, "torch_dtype": "float16",
        "transformers_version": "4.40.2", "use_cache": true, "use_qkv_bias": true, "vocab_size": 100352}""",
        lambda spec: spec.layer_norm and spec.gated and spec.rope.rotated == 16,
    ),
    "Nemotron-Mini-4B-Instruct": (
        """{"architectures": ["NemotronForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 2, "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2", "hidden_dropout": 0.0,
        "hidden_size": 3072, "initializer_range": 0.0134, "intermediate_size": 9216, "kv_channels": 128,
        "max_position_embeddings": 4096, "mlp_bias": false, "model_type": "nemotron", "norm_eps": 1e-05,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "rope_percent": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.32.0.dev0", "use_cache": true, "vocab_size": 256000}""",
        lambda spec: spec.layer_norm and spec.norm_offset and not spec.gated and spec.rope.rotated == 64,
    ),
    "granite-3.3-8b-instruct": (
        """{"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
        "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": true,
        "vocab_size": 49159}""",
        lambda spec: (spec.scales.attention, spec.scales.residual, spec.scales.logits, spec.rope.theta)
        == (0.0078125, 0.22, 16.0, 1e7),
    ),
    "OLMo-2-1124-7B-Instruct": (
        """{"_name_or_path": "allenai/open_instruct_dev", "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0",
        "use_cache": false, "vocab_size": 100352}""",
        lambda spec: spec.norms.before_attention is None and spec.qk_norm.over_all_heads,
    ),
    "Olmo-3-7B": (
        json.dumps({
            "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "layer_types": _EXAONE * 8, "max_position_embeddings": 65536,
            "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
            "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                             "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
            "tie_word_embeddings": False, "use_cache": False, "vocab_size": 100278,
        }),
        lambda spec: (spec.rope_of(0).kind, spec.rope_of(3).kind, spec.rope_of(0).theta) == ("default", "yarn", 5e5),
    ),
    "Phi-3-mini-4k-instruct": (
        """{"_attn_implementation_autoset": true, "_name_or_path": "microsoft/Phi-3-mini-4k-instruct",
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "microsoft/Phi-3-mini-4k-instruct--configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "microsoft/Phi-3-mini-4k-instruct--modeling_phi3.Phi3ForCausalLM"},
        "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 1536,
        "initializer_range": 0.02, "intermediate_size": 4096, "max_position_embeddings": 4096, "model_type": "phi3",
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 16,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false,
        "torch_dtype": "float16", "transformers_version": "4.48.3", "use_cache": true, "vocab_size": 32064}""",
        lambda spec: (spec.sliding_window, all(spec.sliding_layers), spec.rope.rotated) == (2047, True, 96),
    ),
    "Phi-4-mini-instruct": (
        json.dumps({
            "_name_or_path": "Phi-4-mini-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o",
                         "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
            "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
            "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
            "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": _LONG, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
        }),
        lambda spec: (spec.head_dim, spec.rope.rotated, spec.rope.kind) == (128, 96, "longrope"),
    ),
    "gemma-2-9b": (
        """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
        "use_cache": true, "vocab_size": 256000}""",
        lambda spec: (spec.scales.attention, spec.scales.attention_softcap, spec.scales.logits_softcap, spec.tied)
        == (1 / 16, 50.0, 30.0, True) and spec.sliding_layers[:2] == (True, False),
    ),
    "gemma-3-1b-it": (
        """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}""",
        lambda spec: (spec.rope_of(0).theta, spec.rope_of(5).theta, spec.window_of(4), spec.window_of(5))
        == (1e4, 1e6, 512, None),
    ),
    "gemma-3-27b-it": (
        """{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152,
        "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false}}""",
        lambda spec: (spec.vocab, spec.max_length, spec.norm_eps, spec.rope_of(5).kind, spec.rope_of(5).theta)
        == (262208, 131072, 1e-6, "linear", 1e6),
    ),
    "Qwen3.5-27B": (  # Qwen3.6-27B has the same, and fields of experts without a value
        """{"architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
        "text_config": {"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
        "num_experts": null, "num_experts_per_tok": null, "output_gate_type": "swish",
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": 24, "num_hidden_layers": 64,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true,
        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default"}, "use_cache": true, "vocab_size": 248320}, "tie_word_embeddings": false,
        "video_token_id": 248057, "vision_config": {"depth": 27, "hidden_size": 1152}, "vision_end_token_id": 248054,
        "vision_start_token_id": 248053}""",
        lambda spec: (spec.rope.rotated, spec.recurrent.state, spec.recurrent.layers[:4], spec.gated_attention)
        == (64, (48, 128, 128), (True, True, True, False), True),
    ),
    "Qwen3.5-35B-A3B": (
        """{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
        "model_type": "qwen3_5_moe", "text_config": {"attention_bias": false, "attn_output_gate": true,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 16,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true,
        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default"}, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "vocab_size": 248320}, "tie_word_embeddings": false, "vision_config": {"depth": 27}}""",
        lambda spec: (spec.experts.count, spec.experts.shared.intermediate, spec.recurrent.state)
        == (256, 512, (32, 128, 128)) and spec.experts.normalized,
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        """{"architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
        lambda spec: (spec.experts.per_token, spec.rope.rotated, spec.recurrent.layers.count(True)) == (10, 64, 36),
    ),
    "LFM2-1.2B": (
        """{"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true,
        "block_use_xavier_init": true, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048,
        "conv_dim_out": 2048, "conv_use_xavier_init": true, "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
        "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
        "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": true, "use_pos_enc": true,
        "vocab_size": 65536}""",
        lambda spec: (spec.intermediate, spec.recurrent.width, spec.recurrent.layers.count(True), spec.tied)
        == (8192, 2048, 10, True),
    ),
    "LFM2-8B-A1B": (
        """{"architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false,
        "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "max_position_embeddings": 128000,
        "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0, "torch_dtype": "bfloat16", "use_cache": true, "use_expert_bias": true,
        "vocab_size": 65536}""",
        lambda spec: (spec.experts.layers, spec.experts.router.scoring, spec.recurrent.kernel)
        == ((False, False, True, True), "sigmoid", 3),
    ),
    "granite-4.0-h-tiny": (
        """{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup",
        "initializer_range": 0.1, "intermediate_size": 512, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": false,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 4, "num_key_value_heads": 4,
        "num_local_experts": 64, "output_router_logits": false, "pad_token_id": 100256,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000, "router_aux_loss_coef": 0.0001, "shared_intermediate_size": 1024,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}""",
        lambda spec: (spec.recurrent.state, spec.recurrent.layers, any(spec.rotary_layers), spec.experts.count)
        == ((48, 128, 64), (True, True, False, True), False, 64),
    ),
    "granite-4.0-micro": (
        """{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1,
        "intermediate_size": 8192, "layer_types": ["attention", "attention"], "logits_scaling": 10,
        "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_attention_heads": 40, "num_experts_per_tok": 0, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "num_local_experts": 0, "output_router_logits": false, "pad_token_id": 100256,
        "position_embedding_type": "rope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}""",
        lambda spec: (spec.recurrent, spec.experts, spec.intermediate, all(spec.rotary_layers))
        == (None, None, 8192, True),
    ),
    "Bamba-9B-v2": (
        """{"architectures": ["BambaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
        "max_position_embeddings": 4096, "mlp_bias": false, "model_type": "bamba", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 128256}""",
        lambda spec: (spec.recurrent.state, spec.recurrent.layers.count(False), spec.rope.rotated)
        == ((128, 128, 64), 3, 64)
        and (spec.recurrent.conv_bias, spec.recurrent.bias) == (True, False),
    ),
    "Falcon-H1-1.5B-Instruct": (
        """{"architectures": ["FalconH1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": null,
        "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 4096,
        "key_multiplier": 0.390625, "lm_head_multiplier": 0.01953125, "mamba_chunk_size": 256,
        "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_norm_before_gate": false,
        "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 131072,
        "mlp_bias": false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "num_logits_to_keep": 1, "pad_token_id": 0, "projectors_bias": false, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 65537}""",
        lambda spec: (spec.recurrent.state, spec.recurrent.norm, spec.recurrent.scales[0], len(spec.caching_layers))
        == ((48, 256, 64), None, 1.25, 24) and round(spec.scales.logits, 3) == 51.2,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        """{"architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
        "hidden_dropout": 0.0, "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EM-", "initializer_range": 0.02,
        "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
        "mamba_num_heads": 64, "mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 9, "num_key_value_heads": 2, "num_logits_to_keep": 1,
        "pad_token_id": 0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
        "routed_scaling_factor": 2.5, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
        "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true,
        "use_mamba_kernels": true, "vocab_size": 131072}""",
        lambda spec: (spec.recurrent.layers, spec.mlp_layers, spec.experts.layers, spec.experts.shared.intermediate)
        == (
            (True, True, True, False, True),
            (True, True, False, True, True),
            (True, True, False, True, False),
            3712,
        ),
    ),
    "Olmo-Hybrid-7B": (
        """{"architectures": ["OlmoHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 3840, "initializer_range": 0.02,
        "intermediate_size": 11008, "layer_types": ["linear_attention", "linear_attention", "linear_attention",
        "full_attention"], "linear_a_log_max": 16.0, "linear_a_log_min": 0.0, "linear_allow_neg_eigval": true,
        "linear_conv_kernel_dim": 4, "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1, "linear_dt_min": 0.001,
        "linear_key_head_dim": 96, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
        "linear_value_head_dim": 192, "max_position_embeddings": 65536, "model_type": "olmo_hybrid",
        "num_attention_heads": 30, "num_hidden_layers": 4, "num_key_value_heads": 30, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": null, "rope_type": "default"},
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 100352}""",
        lambda spec: (spec.recurrent.state, spec.recurrent.update_scale, any(spec.rotary_layers))
        == ((30, 96, 192), 2.0, False) and spec.norms_of(0) != spec.norms_of(3),
    ),
    "Kimi-Linear-48B-A3B-Instruct": (
        """{"architectures": ["KimiLinearForCausalLM"], "auto_map": {"AutoModelForCausalLM":
        "modeling_kimi.KimiLinearForCausalLM"}, "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
        "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
        "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": [4], "head_dim": 128, "kda_layers": [1, 2, 3, 5], "num_heads": 32,
        "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576, "model_type": "kimi_linear",
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 5, "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": null,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1,
        "topk_method": "noaux_tc", "transformers_version": "4.57.1", "use_cache": true, "use_grouped_topk": true,
        "v_head_dim": 128, "vocab_size": 163840}""",
        lambda spec: (spec.recurrent.layers, spec.recurrent.state, spec.latent.cached, any(spec.rotary_layers))
        == ((True, True, True, False, True), (32, 128, 128), 576, False) and spec.experts.count == 256,
    ),
    "Mistral-Small-3.1-24B": (
        """{"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "text_config": {"attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 32768,
        "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
        "sliding_window": null, "use_cache": true, "vocab_size": 131072}, "transformers_version": "4.57.1",
        "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1}""",
        lambda spec: (spec.family, spec.sliding_window, spec.rope.theta) == ("mistral", None, 1e9),
    ),
    "llava-1.5-7b-hf": (
        """{"architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
        "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "text_config": {"_name_or_path":
        "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type":
        "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064}, "tie_word_embeddings": false,
        "torch_dtype": "float16", "transformers_version": "4.36.0.dev0", "vision_config": {"hidden_size": 1024},
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064}""",
        lambda spec: (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.vocab) == (4096, 32, 32, 32, 32064),
    ),
    "InternVL3-1B": (
        """{"architectures": ["InternVLChatModel"], "auto_map": {"AutoConfig":
        "configuration_internvl_chat.InternVLChatConfig", "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel"}, "downsample_ratio": 0.5,
        "dynamic_image_size": true, "force_image_size": 448, "hidden_size": 896, "image_fold": null, "llm_config":
        {"_name_or_path": "", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 70, "model_type": "qwen2",
        "moe_config": null, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "use_bfloat16": true,
        "use_cache": false, "use_sliding_window": false, "vocab_size": 151674}, "max_dynamic_patch": 12,
        "min_dynamic_patch": 1, "model_type": "internvl_chat", "output_attentions": false, "pad2square": false,
        "ps_version": "v2", "select_layer": -1, "system_message": null, "template": "internvl2_5",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": null, "use_backbone_lora": 0,
        "use_llm_lora": 0, "use_thumbnail": true, "vision_config": {"model_type": "intern_vit_6b"}}""",
        lambda spec: (spec.family, spec.layers, spec.rope.kind, spec.tied, spec.max_length)
        == ("qwen2", 24, "dynamic", False, 32768),
    ),
    "Qwen2.5-VL-7B-Instruct": (
        """{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
        "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": true,
        "use_sliding_window": false, "vision_config": {"depth": 32, "hidden_size": 1280},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064}""",
        lambda spec: (spec.family, spec.qkv_bias, spec.rope.kind, spec.rope.theta, spec.sliding_window)
        == ("qwen2", True, "default", 1e6, None),
    ),
    "Qwen3-VL-4B-Instruct": (
        """{"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
        "text_config": {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": true, "use_cache": true, "vocab_size": 151936},
        "tie_word_embeddings": true, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
        "vision_config": {"depth": 24}, "vision_end_token_id": 151653, "vision_start_token_id": 151652}""",
        lambda spec: (spec.family, spec.qk_norm is not None, spec.rope.theta, spec.tied) == ("qwen3", True, 5e6, True),
    ),
    "Qwen3-VL-30B-A3B-Instruct": (
        """{"architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
        "model_type": "qwen3_vl_moe", "text_config": {"attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": true, "vocab_size": 151936}, "tie_word_embeddings": false,
        "transformers_version": "4.57.0.dev0", "video_token_id": 151656, "vision_config": {"depth": 27},
        "vision_end_token_id": 151653, "vision_start_token_id": 151652}""",
        lambda spec: spec.experts == Experts(128, 8, 768, True, (True,) * 48, gate_up="halves"),
    ),
    "GLM-4.1V-9B-Thinking": (
        """{"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "attention_bias": true,
        "attention_dropout": 0.0, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338, 151348],
        "image_start_token_id": 151339, "image_end_token_id": 151340, "video_start_token_id": 151341,
        "video_end_token_id": 151342, "image_token_id": 151343, "video_token_id": 151344, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 65536,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
        "use_cache": true, "vocab_size": 151552, "partial_rotary_factor": 0.5, "rope_theta": 10000,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "torch_dtype": "bfloat16",
        "vision_config": {"depth": 24}}""",
        lambda spec: (spec.family, spec.qkv_bias, spec.rope.rotated, spec.rope.interleaved) == ("glm4", True, 64, True),
    ),
    "Devstral-2-123B": (
        """{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 128,
        "hidden_size": 12288, "intermediate_size": 28672, "max_position_embeddings": 262144, "num_attention_heads": 96,
        "num_hidden_layers": 88, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": {"beta_fast": 4.0,
        "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.0,
        "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.0, "rope_theta": 1000000.0,
        "rope_type": "yarn", "type": "yarn"}, "sliding_window": null, "tie_word_embeddings": false,
        "vocab_size": 131072}""",
        lambda spec: (spec.rope.kind, spec.rope.query_scale_beta, spec.hidden) == ("yarn", 0.0, 12288),
    ),
    "Hy-MT2-7B": (
        """{"add_classification_head": false, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.1, "attention_head_dim": 128, "bos_token_id": 127958, "cla_share_factor": 2,
        "class_num": 0, "dense_list": [4096, 0], "torch_dtype": "bfloat16", "eos_token_id": 127960, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4,
        "initializer_range": 0.02, "intermediate_size": 14336, "mask_init_id": 12, "max_position_embeddings": 262144,
        "mlp_bias": false, "model_type": "hunyuan_v1_dense", "norm_type": "rms", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "org_vocab_size": 128167, "pad_id": 127961,
        "pad_token_id": 127961, "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic"}, "rope_theta": 10000.0, "use_cache": true, "vocab_size": 128256}""",
        lambda spec: (spec.rope.kind, spec.qk_norm.query, spec.qk_norm.after_rotary)
        == ("dynamic", "query_layernorm", True),
    ),
    "ERNIE-4.5-0.3B": (
        """{"architectures": ["Ernie4_5_ForCausalLM"], "auto_map": {"AutoConfig":
        "configuration_ernie4_5.Ernie4_5_Config", "AutoModel": "modeling_ernie4_5.Ernie4_5_Model",
        "AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"}, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
        "model_type": "ernie4_5", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
        "num_hidden_layers": 18, "pad_token_id": 0, "rms_norm_eps": 1e-05, "use_cache": false, "vocab_size": 103424,
        "rope_theta": 500000, "use_bias": false, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}""",
        lambda spec: (spec.rope.interleaved, spec.qkv_bias, spec.tied) == (True, False, True),
    ),
    "EXAONE-4.0-32B": (
        json.dumps({
            "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27392, "layer_types": _EXAONE * 16, "max_position_embeddings": 131072,
            "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
            "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": True, "vocab_size": 102400,
        }),
        lambda spec: spec.rope_of(3) is None and spec.rope_of(2).kind == "llama3" and spec.window_of(2) == 4096,
    ),
    "Qwen3-30B-A3B": (
        """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
        lambda spec: spec.experts == Experts(128, 8, 768, True, (True,) * 48),
    ),
    "Qwen3-Coder-30B-A3B": (
        """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144,
        "max_window_layers": 28, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "qkv_bias": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "sliding_window": null, "tie_word_embeddings": false,
        "transformers_version": "4.57.1", "use_cache": true, "use_qk_norm": true, "use_sliding_window": false,
        "vocab_size": 151936}""",
        lambda spec: (spec.rope.theta, spec.sliding_window, spec.experts.count) == (1e7, None, 128),
    ),
    "gpt-oss-20b": (
        json.dumps({
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                           "model.embed_tokens", "lm_head"],
                "quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 4096, "truncate": False},
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
        }),
        lambda spec: spec.sinks and spec.max_length == 131072 and (spec.window_of(0), spec.window_of(1)) == (128, None)
        and spec.experts == Experts(32, 4, 2880, True, (True,) * 24, True, "interleaved", ClampedSwiglu(1.702, 7.0)),
    ),
    "Mixtral-8x7B-Instruct-v0.1": (
        """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}""",
        lambda spec: spec.experts == Experts(8, 2, 14336, True, (True,) * 32),
    ),
    "SmolLM3-3B": (
        json.dumps({
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128012, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 128256,
        }),
        lambda spec: spec.tied and [spec.rope_of(i) is None for i in range(4)] == [False, False, False, True],
    ),
} | PUBLISHED_EXPERTS | PUBLISHED_PARALLEL | PUBLISHED_RENAMED | PUBLISHED_VARIANTS  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    config, holds = PUBLISHED[name]
    assert holds(ModelSpec.from_hf(json.loads(config)))


@pytest.mark.parametrize(
    ("name", "full", "sliding"),
    [
        ("gemma-4-E2B-it", (512, 512), (256, 256)),
        ("gemma-4-31B-it", (512, 512), (256, 256)),
        ("Step-3.5-Flash", (128, 64), (128, 128)),
        ("MiMo-V2-Flash", (192, 64), (192, 64)),
    ],
)
def test_each_kind_of_layer_rotates_its_own_share_of_its_own_heads(name, full, sliding):
    spec = ModelSpec.from_hf(json.loads(PUBLISHED[name][0]))
    kinds = {(slides, spec.heads_of(layer).dim, spec.rope_of(layer).rotated)
             for layer, slides in enumerate(spec.sliding_layers)}  # fmt: skip
    assert kinds == {(False, *full), (True, *sliding)}


def test_a_proportional_rotation_is_slower_by_its_factor():
    config = json.loads(PUBLISHED["gemma-4-31B-it"][0])
    text = config["text_config"]
    full = text["rope_parameters"]["full_attention"] | {"factor": 8.0}
    slower = text | {"rope_parameters": text["rope_parameters"] | {"full_attention": full}}
    ropes = [ModelSpec.from_hf(config | {"text_config": each}) for each in (text, slower)]
    before, after = ([spec.rope.frequencies, spec.local_rope.frequencies] for spec in ropes)
    assert after == [tuple(each / 8 for each in before[0]), before[1]]


REQUIRED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gptj": {"rotary_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "bamba": {"mamba_n_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention"] * 8},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "step3p5": {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 24},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 4},
}
THEIRS = {"mimo": "qwen2"}  # the code in the checkpoint is Qwen2's


WITHOUT_CLASS = {  # in transformers; its defaults are in its checkpoints' code
    *("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekForCausalLM", "MiniCPMForCausalLM"),
    *("PanguUltraMoEForCausalLM", "SolarForCausalLM", "TeleChat3ForCausalLM"),
    *("SarvamMoEForCausalLM", "SarvamMLAForCausalLM", "Param2MoEForCausalLM"),
    *(name for row in renamed.ROWS for name in row.architectures),
}


UNLIKE_WRITTEN = {  # transformers writes fields that contradict the small sizes here, or means other layers by them
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "LagunaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "Mistral4ForCausalLM",
    "OPTForCausalLM",
    "OlmoHybridForCausalLM",
    "RWForCausalLM",
    "Step3p5ForCausalLM",
}


def experts_of(config):
    """Number of experts, how many a token has, their width, and that of a shared one, or None if no field says it."""

    def value(*names):
        return next((config[name] for name in names if config.get(name) is not None), None)

    width = value("moe_intermediate_size", "intermediate_size")
    shared = value("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    yield value("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    yield value("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    yield width
    whole = value("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    yield whole if shared is None else shared * width


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in WITHOUT_CLASS])
def test_absent_fields_have_the_defaults_of_transformers(architecture):
    family = FAMILIES[architecture]
    fields = {"model_type": family.name, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"intermediate_size": 32, "num_hidden_layers": 8, "vocab_size": 99, "max_position_embeddings": 64}
    fields |= {family.norm_eps_field: 0.05} | REQUIRED.get(family.name, {})
    theirs = AutoConfig.for_model(**fields | {"model_type": THEIRS.get(family.name, family.name)})
    spec = ModelSpec.from_hf(fields | {"architectures": [architecture]})
    if architecture not in UNLIKE_WRITTEN:
        written = theirs.to_dict() | {"model_type": family.name, "architectures": [architecture]}
        assert ModelSpec.from_hf(written) == spec
    sliding = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    if theirs.to_dict().get("sliding_window") and not sliding and family.name == "mistral":
        sliding = [True] * 8
    assert list(spec.sliding_layers) == (sliding or [False] * 8)
    if spec.latent is None:
        theirs.allow_global_per_layer_attribute_access = True
        assert spec.head_dim == (getattr(theirs, "head_dim", None) or 16)
    else:
        widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert dataclasses.astuple(spec.latent)[:5] == tuple(getattr(theirs, width) for width in widths)
    assert spec.tied == theirs.tie_word_embeddings
    if any(spec.rotary_layers) and hasattr(theirs, "rope_parameters"):
        rope = theirs.rope_parameters
        thetas = [rope.get(kind, rope)["rope_theta"] for kind in ("full_attention", "sliding_attention")]
        assert [spec.rope.theta, (spec.local_rope or spec.rope).theta] == thetas
    if family.name == "gemma4_text":
        heads = [theirs.per_layer_config[layer].head_dim for layer in range(8)]
        assert [spec.heads_of(layer).dim for layer in range(8)] == heads
    if spec.experts is not None:
        sizes = spec.experts.count, spec.experts.per_token, spec.experts.intermediate
        *expected, shared = experts_of(theirs.to_dict())
        assert list(sizes) == expected
        if shared is not None:
            assert (spec.experts.shared.intermediate if spec.experts.shared else 0) == shared
    if hasattr(theirs, "no_rope_layers"):
        assert [int(turned) for turned in spec.rotary_layers] == theirs.no_rope_layers
    if family.name == "granite":
        scales = spec.scales
        ours = [scales.attention, scales.embedding, scales.residual, scales.logits]
        names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        assert ours == [getattr(theirs, name) for name in names]


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in WITHOUT_CLASS])
def test_values_of_absent_fields_are_those_of_transformers(architecture):
    family = FAMILIES[architecture]
    theirs = AutoConfig.for_model(THEIRS.get(family.name, family.name)).to_dict()
    theirs |= theirs.get("rope_parameters") or {}
    shared = (family.defaults or {}).keys() & theirs.keys()
    if family.name == "dots1":
        shared.remove("sliding_window")  # a width without layers that slide
    assert {name: family.defaults[name] for name in shared} == {name: theirs[name] for name in shared}


MODEL_TYPES = {name: kind for kind, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (name, kind)
        for name, part in VISION_LANGUAGE.items()
        if (part.defaults or part.defaults_of) and name in MODEL_TYPES
        for kind in part.architectures
    ],
)
def test_absent_fields_of_a_text_part_have_the_defaults_of_transformers(architecture, kind):
    theirs = AutoConfig.for_model(MODEL_TYPES[architecture], text_config={"model_type": kind}).text_config.to_dict()
    theirs |= theirs.get("rope_parameters") or {}
    ours, _ = text_config({"text_config": {"model_type": kind}}, architecture)
    shared = ours.keys() & theirs.keys()
    assert shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_values_by_layer_of_step_3_5_are_read_as_transformers_saves_them():
    config = json.loads(PUBLISHED["Step-3.5-Flash"][0])
    saved = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    saved["architectures"] = config["architectures"]
    assert isinstance(saved["rope_parameters"]["full_attention"]["rope_theta"], float)
    assert "attention_other_setting" not in saved
    assert ModelSpec.from_hf(saved) == ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False"),
        ({"rope_theta": [1.0] * 7}, "rope_theta should have a value for each of 45 layers"),
        ({"partial_rotary_factors": [0.5, 1.0, 0.5, 1.0] * 12}, "partial_rotary_factors should .* the same kind"),
        ({"swiglu_limits": [-1] * 48}, "swiglu_limits should hold a number of at least 0, or null, for each of 45"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum should list layers"),
        ({"num_sliding_attention_heads": 12}, "should be a multiple of num_key_value_heads, got 12, 8"),
        ({"attention_other_setting": {"head_dim": 64}}, "head_dim is 64"),
    ],
)
def test_other_forms_of_step_3_5_are_rejected(changes, message):
    config = json.loads(PUBLISHED["Step-3.5-Flash"][0]) | changes
    with pytest.raises(BadCheckpoint, match=message):
        ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NVIDIA-Nemotron-3-Ultra", {"time_step_limit": [0.0, 1e308]}),
        (
            "NVIDIA-Nemotron-3-Ultra",
            {"attention_head_dim": 128, "rms_norm_eps": 1e-05, "time_step_rank": 512, "head_dim": None},
        ),
        ("Llama-4-Scout-17B-16E-Instruct", {"for_llm_compressor": True, "nope_layer_interval": 4}),
        ("gemma-4-31B-it", {"expert_intermediate_size": None}),
        ("Phi-3.5-MoE-instruct", {"expert_dropout": 0.0}),
    ],
)
def test_further_published_fields_leave_the_spec_unchanged(name, fields):
    config = json.loads(PUBLISHED[name][0])
    part = config.get("text_config", config)
    changed = config | (part | fields if part is config else {"text_config": part | fields})
    assert ModelSpec.from_hf(changed) == ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("name", "architecture", "renamed_fields", "same"),
    [
        ("internlm-chat-7b", "LlamaForCausalLM", {"bias": "attention_bias"}, {}),
        ("openPangu-Embedded-7B", "LlamaForCausalLM", {"bias": "attention_bias"}, {}),
        ("Orion-14B-Chat", "StableLmForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, {"partial_rotary_factor": 1.0}),
        ("Tele-FLM", "LlamaForCausalLM", {}, {}),
        ("Qwen-7B-Chat", "Qwen2ForCausalLM", {"layer_norm_epsilon": "rms_norm_eps"}, {"intermediate_size": 11008}),
    ],
)
def test_a_family_without_a_class_has_the_spec_of_one_with_the_same_layers(name, architecture, renamed_fields, same):
    config = json.loads(PUBLISHED[name][0])
    spec = ModelSpec.from_hf(config)
    kept = {"hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"}
    kept |= {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size"}
    fields = {name: value for name, value in config.items() if name in kept - {*renamed_fields}}
    fields |= {common: config[own] for own, common in renamed_fields.items()} | same
    theirs = ModelSpec.from_hf(fields | {"architectures": [architecture]})
    differ = {"family": spec.family, "scales": spec.scales, "max_length": spec.max_length}
    assert spec == dataclasses.replace(theirs, **differ)


_SARVAM = {
    "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 131072, "num_hidden_layers": 4,
    "moe_intermediate_size": 1024, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 8e6, "routed_scaling_factor": 2.5, "vocab_size": 262144,
}  # fmt: skip
_LING = {"head_dim": 64, "num_experts": 128, "use_qk_norm": True, "score_function": "sigmoid"}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "first_k_dense_replace": 1}
_YARN_40 = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("architecture", "own", "theirs"),
    [
        ("SarvamMoEForCausalLM", _LING, _LING | {"architectures": ["BailingMoeV2ForCausalLM"]}),
        ("Param2MoEForCausalLM", _LING, _LING | {"architectures": ["BailingMoeV2ForCausalLM"]}),
        (
            "SarvamMLAForCausalLM",
            _MLA | {"num_experts": 128, "rope_scaling": _YARN_40 | {"type": "deepseek_yarn"}},
            _MLA
            | {"n_routed_experts": 128, "rope_scaling": _YARN_40 | {"type": "yarn"}}
            | {"architectures": ["DeepseekV3ForCausalLM"]},
        ),
    ],
)
def test_sarvam_has_the_spec_of_models_with_the_same_router(architecture, own, theirs):
    spec = ModelSpec.from_hf(_SARVAM | own | {"architectures": [architecture]})
    same = ModelSpec.from_hf(_SARVAM | theirs | {"n_group": 1, "topk_group": 1})
    assert spec == dataclasses.replace(same, family=spec.family)


def test_telechat_3_is_a_llama_with_a_yarn_of_its_own():
    config = json.loads(PUBLISHED["AquilaChat2-7B"][0]) | {"model_type": "telechat3"}
    yarn = {"factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 32, "beta_slow": 1}
    own = {"rope_scaling": yarn | {"type": "telechat3-yarn"}, "architectures": ["TeleChat3ForCausalLM"]}
    spec = ModelSpec.from_hf(config | own)
    factor = 0.07 * math.log(8) + 1
    theirs = {"rope_scaling": yarn | {"type": "yarn", "attention_factor": factor}, "model_type": "llama"}
    assert spec == ModelSpec.from_hf(config | theirs | {"architectures": ["LlamaForCausalLM"]})
    assert spec.rope.magnitude == factor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bskcn_3": [0]}, "should have an earlier one in bskcn_1"),
        ({"bskcn_3": [9]}, "be one of 2, it is 9"),
        ({"bskcn_tv": 0.5}, "bskcn_tv hold two numbers"),
        ({"bskcn_4": [1]}, "should have an earlier one"),
    ],
)
def test_streams_of_solar_are_mixed_into_later_ones(fields, message):
    config = json.loads(PUBLISHED["AquilaChat2-7B"][0]) | {"model_type": "solar", "num_hidden_layers": 2}
    config |= {"architectures": ["SolarForCausalLM"], "bskcn_1": [0], "bskcn_3": [1], "bskcn_tv": [0.9, 0.8]}
    assert ModelSpec.from_hf(config).skips == (Skip(0, 1, 0.8),)
    assert ModelSpec.from_hf(config | {"bskcn_1": [0, 1]}).skips == (Skip(1, 1, 0.8),)  # the last one that is not later
    with pytest.raises(BadCheckpoint, match=message):
        ModelSpec.from_hf(config | fields)


def test_openpangu_ultra_has_the_spec_of_deepseek_v3_with_further_norms():
    config = json.loads(PUBLISHED["openPangu-Ultra-MoE-718B"][0]) | {"router_enable_expert_bias": True}
    spec = ModelSpec.from_hf(config)
    own = {"architectures", "model_type", "router_enable_expert_bias", "sandwich_norm"}
    fields = {name: value for name, value in config.items() if name not in own}
    groups = {"n_group": 1, "topk_group": 1}
    theirs = ModelSpec.from_hf(fields | groups | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert spec == dataclasses.replace(theirs, family=spec.family, norms=spec.norms)


def test_minicpm_has_the_spec_of_a_granite_model():
    """Its code is in its checkpoints alone."""
    config = json.loads(PUBLISHED["MiniCPM4-8B"][0])
    own = ("scale_emb", "scale_depth", "dim_model_base", "mup_denominator", "auto_map", "pretraining_tp")
    granite = {name: value for name, value in config.items() if name not in own} | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 32**0.5,
        "logits_scaling": 4096 / 256,
        "attention_multiplier": 128**-0.5,
    }
    assert dataclasses.replace(ModelSpec.from_hf(config), family="granite") == ModelSpec.from_hf(granite)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 8}, {"sparse_config": {"dense_len": 8192}}], ids=lambda changes: next(iter(changes))
)
def test_minicpm_with_further_parts_is_rejected(changes):
    with pytest.raises(BadCheckpoint, match=f"{next(iter(changes))} is .*which the exporter does not implement"):
        ModelSpec.from_hf(json.loads(PUBLISHED["MiniCPM4-8B"][0]) | changes)


def test_a_dense_qwen3_5_may_have_an_empty_list_of_layers_without_experts():
    config = json.loads(PUBLISHED["Qwen3.5-27B"][0])
    text = {name: value for name, value in config["text_config"].items() if name != "rms_norm_eps"}
    changed = config | {"text_config": text | {"mlp_only_layers": []}, "language_model_only": False}
    assert ModelSpec.from_hf(changed) == ModelSpec.from_hf(config)


def test_entries_of_no_rope_layers_beyond_the_layers_are_ignored():
    config = json.loads(PUBLISHED["SmolLM3-3B"][0]) | {"no_rope_layers": [1, 0, 0] * 13}
    assert ModelSpec.from_hf(config).rotary_layers == (True, False, False) * 12


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod is 2.*supported: 1"),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 1.5}, "partial_rotary_factor should rotate an even number"),
        ("Phi-4-mini-instruct", {"rope_scaling": _LONG | {"long_factor": [1.0]}}, "long_factor should be 48 numbers"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'.*'gelu_pytorch_tanh'"),
        ("Hy-MT2-7B", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("stablelm-2-1_6b-chat", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor is 2.0"),
        ("gemma-2b-it", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'.*None, 'gelu_pytorch_tanh'"),
        (
            "granite-3.3-8b-instruct",
            {
                "architectures": ["GraniteSWAForCausalLM"],
                "model_type": "granite_swa",
                "layer_rope_theta": [0, 1e6] * 20,
            },
            "layer_rope_theta should be a list with rope_theta, 10000000.0, or 0 for each layer",
        ),
        ("InternVL3-1B", {"use_llm_lora": 16}, "use_llm_lora is 16"),
        ("InternVL3-1B", {"llm_config": {"model_type": "internlm2"}}, "llm_config should be .* one of llama, qwen2"),
        ("InternVL3-1B", {"auto_map": {"AutoModelForCausalLM": "modeling_other.Other"}}, "auto_map names .* own code"),
        ("Hy-MT2-7B", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, "factor is 2.0"),
        ("SmolLM3-3B", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("SmolLM3-3B", {"no_rope_layers": [1]}, "no_rope_layers should hold 0 or 1 for each of 36 layers"),
        ("EXAONE-4.0-32B", {"layer_types": None}, "sliding_window_pattern should be an integer where"),
        ("gemma-3-27b-it", {"text_config": None}, "text_config should be an object whose model_type is one of gemma3"),
        ("Mistral-Small-3.1-24B", {"text_config": {"model_type": "mamba"}}, "one of mistral, ministral3"),
        ("Qwen2.5-VL-7B-Instruct", {"model_type": "qwen2"}, "text_config should be an object whose model_type is one"),
        ("Mistral-Small-3.1-24B", {"twist": 1}, r"does not support the field\(s\) 'twist'"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "should be at most the number of experts, 128, it is 129"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 3}, "mlp_only_layers should be a list of layers, it is 3"),
        ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
        ("gemma-4-E2B-it", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma-4-E2B-it", {"num_kv_shared_layers": 31}, "should leave a layer of each kind .* it is 31 of 35"),
        ("gemma-4-E2B-it", {"vocab_size_per_layer_input": 99}, "at least vocab_size, 262144, it is 99"),
        ("gemma-4-E2B-it", {"per_layer_config": {"4": {"head_dim": 64}}}, "equal objects for the full layers, 4, 9"),
        ("gemma-4-31B-it", {"num_global_key_value_heads": 5}, "should divide num_attention_heads"),
        ("Phi-3.5-MoE-instruct", {"num_experts_per_tok": 3}, "should be 2 for sparsemixer, it is 3"),
        ("MiMo-V2-Flash", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads should be 8, twice"),
        ("MiMo-V2-Flash", {"hybrid_layer_pattern": [2]}, "hybrid_layer_pattern should hold 0 or 1 for each of 48"),
        ("MiMo-V2-Flash", {"moe_layer_freq": 2}, "moe_layer_freq should be 0 or 1 for each of 48 layers, it is 2"),
        ("Llama-4-Scout-17B-16E-Instruct", {"moe_layers": 3}, "moe_layers should be a list of layers, it is 3"),
        (
            "Llama-4-Scout-17B-16E-Instruct",
            {"layer_types": ["no"]},
            "layer_types should name chunked_attention or full",
        ),
        ("GLM-4.6", {"scoring_func": "softmax"}, "scoring_func is 'softmax'.*supported: 'sigmoid'"),
        ("GLM-4.6", {"n_group": 3}, "n_group should divide the number of experts, 160"),
        ("GLM-4.6", {"n_group": 160, "topk_group": 4}, "into groups of at least 2, it is 160"),
        ("GLM-4.6", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types should name dense or sparse for each of 92"),
        ("GLM-4.6", {"first_k_dense_replace": -1}, "first_k_dense_replace should be a number of layers, it is -1"),
        ("MiniMax-M2", {"attn_type_list": [0, 1]}, "attn_type_list should be 1, full attention, for all 62 layers"),
        ("MiniMax-M2", {"use_routing_bias": False}, "use_routing_bias is False"),
        ("MiniMax-M2", {"rotary_dim": 65}, "should rotate an even number"),
        ("DeepSeek-V2-Lite-Chat", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepSeek-V2-Lite-Chat", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave is False"),
        ("GLM-5.2", {"layer_types": ["full_attention"] * 78}, "layer_types should say deepseek_sparse_attention or"),
        ("Ling-mini-2.0", {"use_bias": True}, "use_bias is True"),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "kv_lora_rank should be an integer of at least 1"),
        (
            "DeepSeek-V3",
            {"rope_scaling": _YARN | {"mscale_all_dim": "1"}},
            "mscale_all_dim and factor should be numbers",
        ),
        ("OLMoE-1B-7B-0924", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("ERNIE-4.5-21B-A3B-PT", {"use_bias": True}, "use_bias is True"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_layer_interval": 0}, "moe_layer_interval should be integers"),
        ("gpt-oss-20b", {"experts_per_token": 8}, "experts_per_token is 8.*supported: 4"),
        ("gpt-oss-20b", {"swiglu_limit": "7"}, "swiglu_limit should be a number"),
        ("gpt-oss-20b", {"swiglu_limit": None}, "swiglu_limit should be a number above 0, or absent, it is None"),
        ("gpt-oss-20b", {"swiglu_alpha": None}, "swiglu_alpha should be a number above 0, or absent, it is None"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar should be a number .* or absent"),
        ("LFM2-1.2B", {"conv_L_cache": 1}, "conv_L_cache should be at least 2, it is 1"),
        ("LFM2-1.2B", {"full_attn_idxs": "2"}, "full_attn_idxs should be a list of layers"),
        ("LFM2-8B-A1B", {"layer_types": ["conv"]}, "layer_types should name conv or full_attention for each of 4"),
        ("LFM2-8B-A1B", {"num_dense_layers": -1}, "num_dense_layers should be an integer of at least 0, it is -1"),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.001, 0.1]}, "time_step_limit should be 0 and infinity"),
        ("granite-4.0-h-tiny", {"mamba_d_head": 32}, "mamba_n_heads times mamba_d_head should be .* 3072"),
        ("granite-4.0-h-tiny", {"mamba_n_groups": 5}, "should be a multiple of their groups, got 48, 5"),
        ("granite-4.0-h-tiny", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("Bamba-9B-v2", {"attn_layer_indices": 9}, "attn_layer_indices should be a list of layers"),
        ("Falcon-H1-1.5B-Instruct", {"ssm_multipliers": [1.0]}, "ssm_multipliers should be 5 numbers"),
        ("Falcon-H1-1.5B-Instruct", {"mamba_d_head": 32}, "mamba_d_head is 32"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", {"hybrid_override_pattern": "ME-"}, "should name mixers, M or"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", {"num_hidden_layers": 8}, "should be the number of blocks, 9, it is 8"),
        ("NVIDIA-Nemotron-3-Super-120B-A12B", {"moe_latent_size": 0}, "moe_latent_size should be an integer of at"),
        ("LFM3-1.7B", {"layer_types": ["conv"]}, "should name conv or full_attention or sliding_attention for each of"),
        ("LFM3-1.7B", {"use_sandwich_norm": False}, "use_sandwich_norm is False"),
        ("Kimi-Linear-48B-A3B-Instruct", {"num_local_experts": 8}, "another name of n_routed_experts should be equal"),
        ("Kimi-Linear-48B-A3B-Instruct", {"num_hidden_layers": 6}, "should name each layer once, counted from 1"),
        ("ERNIE-4.5-0.3B", {"attention_bias": True}, r"does not support the field\(s\) 'attention_bias'"),
    ],
)
def test_a_value_that_changes_the_graph_is_rejected(name, changes, message):
    config = json.loads(PUBLISHED[name][0])
    if name.startswith(("gemma-4", "Llama-4")):
        changes = {"text_config": config["text_config"] | changes}
    with pytest.raises(BadCheckpoint, match=message):
        ModelSpec.from_hf(config | changes)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B-Chat"])
def test_all_layers_of_a_qwen_mixture_slide_if_the_flag_is_set(name):
    config = json.loads(PUBLISHED[name][0]) | {"use_sliding_window": True, "sliding_window": 4096}
    spec = ModelSpec.from_hf(config)
    assert (spec.sliding_window, set(spec.sliding_layers)) == (4096, {True})


def test_no_layer_slides_if_the_window_is_null():
    config = json.loads(PUBLISHED["EXAONE-4.0-32B"][0]) | {"layer_types": None, "sliding_window": None}
    spec = ModelSpec.from_hf(config)
    assert (spec.sliding_window, spec.sliding_layers) == (None, (False,) * 64)


def test_longrope_selects_factors_by_the_longest_served_text():
    config = json.loads(PUBLISHED["Phi-4-mini-instruct"][0])
    short, long = (ModelSpec.from_hf(config, length=length).rope for length in (4096, 4097))
    assert short.frequencies[0] == long.frequencies[0]
    assert all(a > b for a, b in zip(short.frequencies[1:], long.frequencies[1:], strict=True))
    assert short.magnitude == long.magnitude > 1
    assert ModelSpec.from_hf(config).rope == long


def test_values_by_layer_of_hunyuan_must_be_equal():
    config = AutoConfig.for_model("hunyuan_v1_moe", num_hidden_layers=3, moe_topk=2, num_experts=4).to_dict()
    config["architectures"] = ["HunYuanMoEV1ForCausalLM"]
    config["moe_intermediate_size"] = config["intermediate_size"]
    spec = ModelSpec.from_hf(config)
    assert ModelSpec.from_hf(config | {"moe_topk": [2] * 3, "num_experts": [4] * 4}) == spec
    for other in ([2, 2, 3], [2, 3, 2], [2, 2], [], [2.0] * 3, 0):
        with pytest.raises(BadCheckpoint, match="moe_topk should be an integer of at least 1, the same in every layer"):
            ModelSpec.from_hf(config | {"moe_topk": other})


def test_a_config_with_two_architectures_is_no_vision_language_model():
    name = next(iter(VISION_LANGUAGE))
    assert vision_language({"architectures": [name]}) == name
    for others in ([name, name], [], name, None, ["LlamaForCausalLM"]):
        assert vision_language({"architectures": others}) is None


RECIPES = {  # for a GPU, and whose published config is here
    "qwen3.6-35b-a3b": "Qwen3.5-35B-A3B",
    "qwen3.8-27b": "Qwen3.5-27B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gemma-4-26b-a4b": "gemma-4-26B-A4B-it",
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_included_recipe_says_what_a_token_and_a_recurrent_state_of_its_model_take(name, tmp_path):
    recipe, text = Recipe.load(locate(name)), locate(name).read_text()
    spec = ModelSpec.from_hf(json.loads(PUBLISHED[RECIPES[name]][0]))
    inputs = spec.contract(capacity=recipe.capacity, dtype="bfloat16", cache="paged").inputs

    def nbytes(*kinds: str) -> int:
        kept = [binding for binding in inputs if binding.name.startswith(kinds)]
        return sum(math.prod(dim for dim in of.shape if isinstance(dim, int)) * BYTES[of.dtype] for of in kept)

    assert f": {nbytes('past_key.', 'past_value.') / BLOCK_SIZE / 1024:.0f} KiB a token" in text
    assert (f"a recurrent state of {nbytes('past_state.') / 2**20:.0f} MiB" in text) is (spec.recurrent is not None)
    assert f"at most {spec.max_length} (max_position_embeddings)" in text
    (tmp_path / "config.json").write_text(PUBLISHED[RECIPES[name]][0])
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1}}')
    assert plan(str(tmp_path), 10**9).token == nbytes("past_key.", "past_value.") // BLOCK_SIZE
