"""Configs of published checkpoints whose layers differ in shape, with all fields that were seen, from memory."""

import json

from tandemrt.export.read.layer import Heads, LayerInputs

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
        and spec.variants.inputs == LayerInputs(256, 262144)
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
}  # fmt: skip
