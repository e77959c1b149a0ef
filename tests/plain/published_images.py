"""Configs and image processors of published checkpoints, as public repositories quote them, whole or of the tower.

Each has config.json, the file with the image processor, processor_config.json, and special tokens of the tokenizer.
"""

from typing import Any

HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
STEPS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
RESCALE = {"rescale_factor": 0.00392156862745098}
_QWEN3_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
}  # fmt: skip
_QWEN3_TOWER = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
    "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
_QWEN3_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, **HALVES, "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
_QWEN_TOKENS = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656}
_QWEN25_TOWER = {
    "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280, "in_channels": 3,
    "in_chans": 3, "initializer_range": 0.02, "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
    "temporal_patch_size": 2, "tokens_per_second": 2, "torch_dtype": "float32", "window_size": 112,
}  # fmt: skip
_QWEN25 = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
    "use_cache": True, "use_sliding_window": False, "video_token_id": 151656, "vision_config": _QWEN25_TOWER,
    "vision_end_token_id": 151653, "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
_QWEN25_PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP,
    "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
_GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "initializer_range": 0.02,
        "intermediate_size": 21504, "max_position_embeddings": 131072, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0, "sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True,
        "use_cache": True, "vocab_size": 262208,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
_GEMMA3_PROCESSOR = {
    **STEPS, "do_convert_rgb": None, "do_pan_and_scan": None, **HALVES,
    "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None, "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor", "resample": 2, **RESCALE, "size": {"height": 896, "width": 896},
}  # fmt: skip
_SMOLVLM = {
    "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "model_type": "smolvlm",
    "pad_token_id": 128002, "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformers_version": "4.47.1", "use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49280,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
        "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
        "_flash_attn_2_enabled": True, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1,
        "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
        "perceiver_config": {
            "hidden_act": "silu", "model_type": "vllama3", "num_key_value_heads": 1, "qk_layer_norms_perceiver": False,
            "resampler_depth": 6, "resampler_head_dim": 96, "resampler_n_heads": 16, "resampler_n_latents": 64,
            "transformers_version": "4.46.0",
        },
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "smolvlm_vision",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
}  # fmt: skip
_SMOLVLM_PROCESSOR = {
    **STEPS, "do_image_splitting": True, "do_pad": True, **HALVES, "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 512}, "processor_class": "SmolVLMProcessor", "resample": 1, **RESCALE,
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
}  # fmt: skip
_PIXTRAL_TOWER = {
    "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
    "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "transformers_version": "4.57.1", "vision_feature_layer": -1,
    "vision_config": {**_PIXTRAL_TOWER, "rope_theta": 10000.0},
    "text_config": {
        "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
}  # fmt: skip
_MINISTRAL = {
    **_MISTRAL, "tie_word_embeddings": True, "transformers_version": "5.2.0",
    "vision_config": {**_PIXTRAL_TOWER, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "text_config": {
        "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 26, "num_key_value_heads": 8, "pad_token_id": 11, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 131072,
    },
}  # fmt: skip
_MAGISTRAL_PROCESSOR = {  # of Magistral Small 2509, which has the tower of Mistral Small 3.1
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None,
    "do_center_crop": None, **STEPS, **CLIP, "image_processor_type": "PixtralImageProcessor",
    "input_data_format": None, "patch_size": {"height": 14, "width": 14}, "processor_class": "PixtralProcessor",
    "resample": 3, **RESCALE, "return_tensors": None, "size": {"longest_edge": 1540},
}  # fmt: skip
_PIXTRAL_TEXT = {
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]", "patch_size": 14,
    "processor_class": "PixtralProcessor", "spatial_merge_size": 2,
}  # fmt: skip
_PIXTRAL_TOKENS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
_LFM2 = {
    "architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2-vl", "downsample_factor": 2,
    "image_token_index": 396, "projector_hidden_size": 2560, "projector_use_layernorm": True, "projector_bias": True,
    "vision_feature_layer": -1, "max_num_patches": 1024, "tile_size": 512, "eos_token_id": 7,
    "text_config": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 65536, "conv_L_cache": 3, "conv_bias": False,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 128_000, "norm_eps": 1e-5, "intermediate_size": 6656,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "vision_config": {
        "model_type": "siglip2_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_channels": 3, "patch_size": 16, "num_patches": 256, "layer_norm_eps": 1e-6,
    },
}  # fmt: skip
_LFM2_PROCESSOR = {
    "do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, **HALVES,
    "image_processor_type": "Lfm2VlImageProcessorFast", "max_image_tokens": 256, "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "resample": 2, **RESCALE,
    "tile_size": 512, "use_thumbnail": True,
}  # fmt: skip
_LFM2_TOKENS = {"<image>": 396, "<|image_start|>": 498, "<|image_end|>": 499, "<|img_thumbnail|>": 497}
_GEMMA4_TOWER = {
    "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280, "global_head_dim": 72,
    "head_dim": 72, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 4304, "max_position_embeddings": 131072, "model_type": "gemma4_vision",
    "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "patch_size": 16,
    "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": True,
    "use_clipped_linears": False,
}  # fmt: skip
_GEMMA4_PROCESSOR = {
    **STEPS, "do_normalize": False, "image_mean": [0.0, 0.0, 0.0], "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280, "image_std": [1.0, 1.0, 1.0], "max_soft_tokens": 280, "patch_size": 16,
    "pooling_kernel_size": 3, "resample": 3, **RESCALE,
}  # fmt: skip
_GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "image_token_id": 258880, "boi_token_id": 255999,
    "eoi_token_id": 258882, "vision_config": _GEMMA4_TOWER,
    "text_config": {"hidden_size": 2816, "use_bidirectional_attention": "vision"},
}  # fmt: skip
_GEMMA_TOKENS = {"<start_of_image>": 255999, "<end_of_image>": 256000, "<image_soft_token>": 262144}
_GEMMA4_TOKENS = {"<|image>": 255999, "<|image|>": 258880, "<image|>": 258882}
_SMOLVLM_TOKENS = {"<image>": 49190, "<fake_token_around_image>": 49189, "<global-img>": 49152}

# By name: the files of a checkpoint, special tokens, and what is read: layers, tokens of the largest image, taps.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, int], tuple[int, int, tuple[int, ...]]]] = {
    "Qwen3-VL-8B": (
        {
            "config": _QWEN3
            | {"text_config": _QWEN3_TEXT, "tie_word_embeddings": False, "vision_config": _QWEN3_TOWER},
            "preprocessor_config": _QWEN3_PROCESSOR,
        },
        _QWEN_TOKENS,
        (27, 16384, (8, 16, 24)),
    ),
    "Qwen3-VL-4B": (
        {
            "config": _QWEN3
            | {
                "text_config": _QWEN3_TEXT
                | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
                "tie_word_embeddings": True,
                "vision_config": _QWEN3_TOWER
                | {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024}
                | {"intermediate_size": 4096, "out_hidden_size": 2560},
            },
            "preprocessor_config": _QWEN3_PROCESSOR,
        },
        _QWEN_TOKENS,
        (24, 16384, (5, 11, 17)),
    ),
    "Qwen2.5-VL-7B": (
        {
            "config": _QWEN25,
            "preprocessor_config": _QWEN25_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessor"},
        },
        _QWEN_TOKENS,
        (32, 16384, ()),
    ),
    "Qwen2.5-VL-7B of January 2025": (
        {
            "config": _QWEN25,
            "preprocessor_config": _QWEN25_PROCESSOR | {"image_processor_type": "Qwen2_5_VLImageProcessor"},
        },
        _QWEN_TOKENS,
        (32, 16384, ()),
    ),
    "gemma-3-27b": (
        {
            "config": _GEMMA3,
            "preprocessor_config": _GEMMA3_PROCESSOR,
            "processor_config": {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
        },
        _GEMMA_TOKENS,
        (27, 256, ()),
    ),
    "SmolVLM2-500M-Video": (
        {
            "config": _SMOLVLM,
            "preprocessor_config": _SMOLVLM_PROCESSOR,
            "processor_config": {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        },
        _SMOLVLM_TOKENS,
        (12, 64, ()),
    ),
    "Mistral-Small-3.1-24B": (
        {
            "config": _MISTRAL,
            "preprocessor_config": _MAGISTRAL_PROCESSOR,
            "processor_config": _PIXTRAL_TEXT,
        },
        _PIXTRAL_TOKENS,
        (24, 3025, ()),
    ),
    "Ministral-3-3B": (
        {
            "config": _MINISTRAL,
            "processor_config": _PIXTRAL_TEXT
            | {
                "image_processor": {
                    **STEPS, **CLIP, "image_processor_type": "PixtralImageProcessorFast", "patch_size": 14,
                    "resample": 3, **RESCALE, "size": {"longest_edge": 1540}, "data_format": "channels_first",
                }
            },
        },
        _PIXTRAL_TOKENS,
        (24, 3025, ()),
    ),
    "LFM2-VL-450M": (
        {
            "config": _LFM2,
            "processor_config": {"image_processor": _LFM2_PROCESSOR, "processor_class": "Lfm2VlProcessor"},
        },
        _LFM2_TOKENS,
        (12, 256, ()),
    ),
    "gemma-4-26B-A4B": (
        {"config": _GEMMA4, "processor_config": {"image_processor": _GEMMA4_PROCESSOR, "image_seq_length": 280}},
        _GEMMA4_TOKENS,
        (27, 280, ()),
    ),
}  # fmt: skip
