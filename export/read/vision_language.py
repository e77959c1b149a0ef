"""Read the text part of a vision-language or audio checkpoint; the exporter leaves its tower out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.layer import GateUp
from tandemrt.export.read.unused_fields import runs_the_same_model


@dataclass(frozen=True)
class TextPart:
    """``architectures``: model_type of ``text_config`` -> the architecture with the same text model.

    ``flat``: the model_type of configs without a ``text_config``, whose fields of the text part are at the top; they
    belong to the first architecture. ``defaults``: fields that transformers adds to a config without them;
    ``defaults_of``: the same by model_type of ``text_config``.
    ``gate_up``: how its experts are stored, if not as those of the text architecture; see Experts. ``config_field``:
    the field with the text part's config; if it is not ``text_config``, the checkpoint's own code reads the config.
    """

    architectures: Mapping[str, str]
    flat: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gate_up: GateUp | None = None
    config_field: str = "text_config"


_QWEN = {"rope_theta": 1_000_000.0}
_QWEN3 = {"rope_theta": 500_000.0}
_LLAVA = TextPart(
    {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    defaults_of={
        "llama": {"intermediate_size": 11008},
        "mistral": {"intermediate_size": 14336},
        "qwen2": {"intermediate_size": 22016},
    },
)
_KIMI = {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
VISION_LANGUAGE = {
    "Step3p7ForConditionalGeneration": TextPart({"step3p5": "Step3p5ForCausalLM"}),
    "Exaone4_5_ForConditionalGeneration": TextPart(
        {"exaone4": "Exaone4ForCausalLM", "exaone4_5_text": "Exaone4ForCausalLM"}
    ),
    "Glm4vMoeForConditionalGeneration": TextPart({"glm4v_moe_text": "Glm4MoeForCausalLM"}),
    "GotOcr2ForConditionalGeneration": TextPart({"qwen2": "Qwen2ForCausalLM"}),
    "Idefics3ForConditionalGeneration": TextPart({"llama": "LlamaForCausalLM"}),
    "KimiK25ForConditionalGeneration": TextPart(_KIMI),
    "Kimi_K25ForConditionalGeneration": TextPart(_KIMI),
    "Lfm2VlForConditionalGeneration": TextPart({"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}),
    "Lfm3VlForConditionalGeneration": TextPart({"lfm3": "Lfm3ForCausalLM"}, defaults={"tie_word_embeddings": True}),
    "LightOnOcrForConditionalGeneration": TextPart({"qwen3": "Qwen3ForCausalLM"}),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "SmolVLMForConditionalGeneration": TextPart({"llama": "LlamaForCausalLM"}),
    "Gemma3ForConditionalGeneration": TextPart({"gemma3_text": "Gemma3ForCausalLM"}),
    "Gemma4ForConditionalGeneration": TextPart({"gemma4_text": "Gemma4ForCausalLM"}),
    "Glm46VForConditionalGeneration": TextPart({"glm4v_text": "Glm4ForCausalLM"}),
    "Glm4vForConditionalGeneration": TextPart({"glm4v_text": "Glm4ForCausalLM"}, flat="glm4v"),
    "InternVLChatModel": TextPart(
        {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        },
        config_field="llm_config",
    ),
    "InternVLForConditionalGeneration": TextPart({"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}),
    "Llama4ForConditionalGeneration": TextPart({"llama4_text": "Llama4ForCausalLM"}),
    "Mistral3ForConditionalGeneration": TextPart(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}
    ),
    "Qwen2AudioForConditionalGeneration": TextPart({"qwen2": "Qwen2ForCausalLM"}),
    "Qwen2VLForConditionalGeneration": TextPart({"qwen2_vl_text": "Qwen2ForCausalLM"}, "qwen2_vl", _QWEN),
    "Qwen2_5_VLForConditionalGeneration": TextPart({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, "qwen2_5_vl", _QWEN),
    "Qwen3_5ForConditionalGeneration": TextPart({"qwen3_5_text": "Qwen3_5ForCausalLM"}),
    "Qwen3_5MoeForConditionalGeneration": TextPart({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}),
    "Qwen3VLForConditionalGeneration": TextPart({"qwen3_vl_text": "Qwen3ForCausalLM"}, defaults=_QWEN3),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, defaults=_QWEN3 | {"norm_topk_prob": True}, gate_up="halves"
    ),
    "VoxtralForConditionalGeneration": TextPart(
        {"llama": "LlamaForCausalLM"}, defaults={"rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0}
    ),
}
_FIELDS_OF_IMAGES = frozenset((
    *("vision_config", "text_config", "llm_config", "vision_feature_layer", "vision_feature_select_strategy"),
    "spatial_merge_size",
    *("projector_hidden_act", "multimodal_projector_bias", "mm_tokens_per_image", "image_seq_length"),
    *("audio_config", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id"),
    "vision_soft_tokens_per_image",
    *("image_grid_pinpoints", "video_token_index", "vision_aspect_ratio", "scale_factor", "downsample_factor"),
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm", "visual_indicator_token_ids"),
    *("projection_hidden_size", "projection_layer_norm_eps", "media_placeholder_token_id", "video_placeholder"),
    *("use_unified_vision_chunk", "ignore_index", "_pad_token_id", "image_newline_token_id"),
    *("dynamic_image_size", "force_image_size", "image_fold", "max_dynamic_patch", "min_dynamic_patch", "pad2square"),
    *("ps_version", "select_layer", "system_message", "template", "use_backbone_lora", "use_thumbnail"),
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_pixels_tolerance", "max_tiles"),
    *("min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "language_model_only"),
    *("audio_token_index", "image_placeholder", "understand_projector_stride", "downsample_ratio"),
    *("image_token_index", "vision_token_id", "max_num_patches", "pixel_shuffle_factor"),
    "perceiver_config",  # of use_resampler
    *("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
    *(f"{kind}_{end}_token_id" for kind in ("image", "video", "vision") for end in ("start", "end")),
))  # fmt: skip
# Prefixes of the text part: in the first files, and in current transformers.
_TEXT = re.compile(r"(?:language_model\.(?=model\.|lm_head\.)|(?<=^model\.)(?:language_model|text_model)\.)")
_TOWER = re.compile(
    r"(?:model\.)?(?:(?:vision_tower|vision_model|vision_encoder|vision_projection|visual|multi_modal_projector|"
    r"mm_projector|mlp1|vit_large_projector|mlp_AR|connector|audio_tower|embed_vision|embed_audio|visual_embeddings_table)\.|image_newline$)"
)


def vision_language(config: Mapping[str, Any]) -> str | None:
    """Return the vision-language architecture of a config, or None if the model reads text only."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and len(named) == 1 and str(named[0]) in VISION_LANGUAGE else None


def gate_up_of(config: Mapping[str, Any]) -> GateUp | None:
    """Return how a vision-language checkpoint stores its experts, or None for the way of the text architecture."""
    architecture = vision_language(config)
    return None if architecture is None else VISION_LANGUAGE[architecture].gate_up


def text_config(config: Mapping[str, Any], architecture: str) -> tuple[dict[str, Any], str]:
    """Return the config of the text part without model_type, and the architecture with the same text model.

    Raises BadCheckpoint if the config has no text part that is implemented.
    """
    part = VISION_LANGUAGE[architecture]
    text, kind = config.get(part.config_field), None
    if text is None and part.flat is not None and config.get("model_type") == part.flat:
        text, text_architecture = {}, next(iter(part.architectures.values()))
    else:
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        if not isinstance(text, Mapping) or str(kind) not in part.architectures:
            raise BadCheckpoint(
                f"config.json: {part.config_field} should be an object whose model_type is one of "
                f"{', '.join(part.architectures)}, it is {quoted(text)}"
            )
        text_architecture = part.architectures[str(kind)]
    merged = {**part.defaults, **part.defaults_of.get(str(kind), {}), **config, **text}
    if "tie_word_embeddings" in config and part.config_field == "text_config":  # transformers reads the outer one
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    if runs_the_same_model(config.get("auto_map", {}), architecture):
        merged.pop("auto_map", None)
    return {
        name: value for name, value in merged.items() if name not in (*_FIELDS_OF_IMAGES, "model_type")
    }, text_architecture


def text_tensor(name: str) -> str | None:
    """Return the name that a tensor of the text part has in a text-only checkpoint; None for the vision tower."""
    return None if _TOWER.match(name) else _TEXT.sub("", name, count=1)
