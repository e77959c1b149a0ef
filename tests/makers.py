"""Makers of tiny checkpoints with a tokenizer, written as ordinary Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

DELIMITERS = ("<|endoftext|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
VOCAB = 320  # a multiple of 32 above the tokenizer's size, so that a few ids have no token


def tiny_tokenizer(folder: Path, *, extra: tuple[str, ...] = ()) -> Path:
    """Write a byte-level tokenizer: a token per byte, a few merges, one token per delimiter. Return the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("Ġ", "the"), ('"', ":")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*DELIMITERS, *extra)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    return folder


def tiny_checkpoint(
    folder: Path,
    *,
    vocab: int = VOCAB,
    layers: int = 2,
    hidden: int = 32,
    head_dim: int = 16,
    max_length: int = 256,
    seed: int = 0,
    experts: int = 0,
) -> Path:
    """Write a random Qwen3 model in float32 with the tokenizer of ``tiny_tokenizer``. Return the folder.

    ``experts``: the number of experts in each layer, of which a token runs two; 0: a dense model.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=263,
        pad_token_id=262,
        **(more if experts else {}),
    )
    return _random_model(config, folder, seed)


def tiny_hybrid(
    folder: Path,
    kind: str = "delta net",
    *,
    layers: int = 4,
    hidden: int = 32,
    seed: int = 0,
    max_length: int = 512,
    **sizes: int,
) -> Path:
    """Write a random hybrid model in float32, every second layer recurrent, beginning with the first.

    ``kind``: "delta net" (Qwen3.5), "experts" (the same with experts), "mamba" (Granite 4) or "convolution" (LFM2).
    ``sizes``: other fields of its config. Returns the folder.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        **_HYBRIDS[kind] | sizes,
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        layer_types=[_RECURRENT[kind], "full_attention"] * (layers // 2) + [_RECURRENT[kind]] * (layers % 2),
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=263,
        pad_token_id=262,
    )
    return _random_model(config, folder, seed)


def tiny_latent(folder: Path, kind: str = "youtu", *, layers: int = 2, seed: int = 0) -> Path:
    """Write a random model with latent attention of the published widths, in float32: "youtu" or "deepseek_v3".

    Returns the folder.
    """
    from transformers import AutoConfig

    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    config = AutoConfig.for_model(
        kind,
        **experts if kind == "deepseek_v3" else {},
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=263,
        pad_token_id=262,
    )
    return _random_model(config, folder, seed)


IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SEES = """{%- for m in messages %}<|im_end|>{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"""
IMAGE_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * 64, "longest_edge": 24 * 64},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
GEMMA4_SETTINGS = {
    "image_processor_type": "Gemma4ImageProcessor",
    "max_soft_tokens": 70,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}
PIXTRAL_SETTINGS = {
    "image_processor_type": "PixtralImageProcessorFast",
    "size": {"longest_edge": 48},
    "patch_size": {"height": 4, "width": 4},
    "do_pad": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
PIXTRAL_TOKENS = {
    "image_token": IMAGE_TOKENS[2],
    "image_break_token": IMAGE_TOKENS[3],
    "image_end_token": IMAGE_TOKENS[1],
    "patch_size": 4,
    "spatial_merge_size": 2,
}
IDEFICS3_SETTINGS = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 96},
    "max_image_size": {"longest_edge": 34},
    "do_image_splitting": True,
    "do_pad": True,
    "resample": 1,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
IDEFICS3_TOKENS = ("<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>")
LFM2_SETTINGS = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "do_image_splitting": True,
    "use_thumbnail": True,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "tile_size": 24,
    "min_tiles": 2,
    "max_tiles": 4,
    "do_pad": True,
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
LFM2_TOKENS = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>")
GEMMA3_SETTINGS = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "do_pan_and_scan": None,
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# By model_type of towers that see tiles: special tokens, and settings of the image processor.
TILED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "smolvlm": (IDEFICS3_TOKENS, IDEFICS3_SETTINGS),
    "idefics3": (IDEFICS3_TOKENS, {**IDEFICS3_SETTINGS, "image_processor_type": "Idefics3ImageProcessor"}),
    "lfm2_vl": (LFM2_TOKENS, LFM2_SETTINGS),
}


def tiny_vision(folder: Path, kind: str = "qwen3_vl") -> Path:
    """Write a random model that reads images, in float32: tokens of 8 x 8 pixels, 4 to 24 per image. Return the folder.

    ``kind``: a key of _SEEING, model_type and what differs. Those of Gemma 3 have 16 tokens per image, those of Gemma 4
    up to 70, and those of Mistral up to 36 and their breaks.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type = kind.partition(" ")[0]
    text, tower, outer = _SEEING[kind]
    config = AutoConfig.for_model(
        model_type, text_config={**_SEEING_TEXT, **text}, vision_config=tower, eos_token_id=263, **outer
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # else images would hardly change a logit
                if ("visual" in name or "vision_tower" in name) and parameter.dim() > 1:
                    parameter.mul_(8)
                if name == "lm_head.weight":
                    parameter.mul_(40)
                if any(
                    part in name for part in ("mm_input_projection", "embedding_projection", "position_embedding_table")
                ):
                    parameter.normal_()
                if "multi_modal_projector" in name and model_type in ("mistral3", "lfm2_vl"):
                    parameter.normal_(std=0.3)
                if "connector" in name or ("patch_embedding.weight" in name and model_type in TILED):
                    parameter.normal_(std=0.3)
            for name, buffer in model.named_buffers():  # bounds of clipped matmuls, and standards of Gemma 4
                if name.endswith(("put_min", "put_max", "std_bias", "std_scale")):
                    buffer.copy_({"min": -1.5, "max": 1.0, "bias": 0.2, "scale": 0.7}[name.rpartition("_")[2]])
        model.save_pretrained(folder)
    tiny_tokenizer(folder, extra=(*IMAGE_TOKENS, *TILED.get(model_type, ((), {}))[0]))
    written = {"gemma3": (0,)}.get(model_type, (0, 2, 1) if model_type.startswith("qwen") else (2,))
    image = "".join(IMAGE_TOKENS[at] for at in written)
    (folder / "chat_template.jinja").write_text(_SEES.replace("IMAGE", image))
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings(kind)))
    if model_type == "mistral3":
        (folder / "processor_config.json").write_text(json.dumps(PIXTRAL_TOKENS))
    return folder


def image_settings(kind: str) -> dict[str, Any]:
    """Return the settings of the image processor of ``tiny_vision``."""
    model_type = kind.partition(" ")[0]
    of_type = {"gemma3": GEMMA3_SETTINGS, "gemma4": GEMMA4_SETTINGS, "mistral3": PIXTRAL_SETTINGS}
    return (of_type | {name: settings for name, (_, settings) in TILED.items()}).get(model_type, IMAGE_SETTINGS)


def _random_model(config: Any, folder: Path, seed: int) -> Path:
    """Write a random model of ``config`` with the tokenizer of ``tiny_tokenizer``. Return the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return tiny_tokenizer(folder)


# The least sizes of keys and of attention heads with kernels, by kind.
_WITH_KERNELS = {
    "delta net": {"linear_key_head_dim": 32},
    "mamba": {"mamba_d_state": 32, "num_attention_heads": 1},
    "convolution": {"num_attention_heads": 1},
}
ON_A_GPU = _WITH_KERNELS["delta net"]


def on_a_gpu(kind: str) -> dict[str, int]:
    """Return the sizes of a tiny hybrid that its kernels support."""
    return _WITH_KERNELS[kind]


_RECURRENT = {
    "delta net": "linear_attention",
    "experts": "linear_attention",
    "mamba": "linear_attention",
    "convolution": "conv",
}
_DELTA_NET: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "delta net": {"model_type": "qwen3_5_text", "intermediate_size": 64, **_DELTA_NET},
    "experts": {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        **_DELTA_NET,
    },
    "mamba": {
        "model_type": "granitemoehybrid",
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "convolution": {
        "model_type": "lfm2",
        "intermediate_size": 64,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


_QWEN3_VL: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
}
_QWEN3_5: dict[str, Any] = {
    **_DELTA_NET,
    **ON_A_GPU,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        **_QWEN3_VL["rope_parameters"],
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.25,
    },
}
_SEEING_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 263,
}
_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 36,
}
_DEEPSTACK = {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}
_QWEN2_5_TOWER = {
    **{name: value for name, value in _QWEN_TOWER.items() if name != "num_position_embeddings"},
    "hidden_act": "silu",
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
    "in_channels": 3,
    "in_chans": 3,
    "spatial_patch_size": 4,
}
_QWEN2_5_VL: dict[str, Any] = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [8, 4, 4]},
}
_FIRST = 262 + len(DELIMITERS)
_QWEN_TOKENS = {
    "vision_start_token_id": _FIRST,
    "vision_end_token_id": _FIRST + 1,
    "image_token_id": _FIRST + 2,
    "video_token_id": _FIRST + 3,
}
_GEMMA_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
}
_GEMMA4_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 140,
    "default_output_length": 280,
    "global_head_dim": 16,
}
_GEMMA4_TOKENS = {"boi_token_id": _FIRST, "eoi_token_id": _FIRST + 1, "image_token_id": _FIRST + 2}
_PIXTRAL_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 4,
    "hidden_act": "silu",
}
_GEMMA_TOKENS = {"boi_token_index": _FIRST, "eoi_token_index": _FIRST + 1, "image_token_index": _FIRST + 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# By model_type: fields of the text part, of the tower, and around them.
_SEEING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (_QWEN3_VL, _DEEPSTACK, _QWEN_TOKENS),
    "qwen3_vl_moe": ({**_QWEN3_VL, **_EXPERTS}, _DEEPSTACK, _QWEN_TOKENS),
    "qwen2_5_vl": (_QWEN2_5_VL, _QWEN2_5_TOWER, _QWEN_TOKENS),
    "qwen3_5": (_QWEN3_5, _QWEN_TOWER, _QWEN_TOKENS),
    "qwen3_5_moe": (
        {**{name: value for name, value in _HYBRIDS["experts"].items() if name != "model_type"}, **_QWEN3_5},
        _QWEN_TOWER,
        _QWEN_TOKENS,
    ),
    "gemma3": (
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        _GEMMA_TOWER,
        {**_GEMMA_TOKENS, "mm_tokens_per_image": 16},
    ),
    "gemma4": (
        {**_GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1},
        {**_GEMMA4_TOWER, "use_clipped_linears": True},
        _GEMMA4_TOKENS,
    ),
    "gemma4 both ways": (
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        {**_GEMMA4_TOWER, "standardize": True},
        _GEMMA4_TOKENS,
    ),
    **{
        kind: (
            {"model_type": "llama", "head_dim": 32},
            {**_GEMMA_TOWER, "image_size": 34, "model_type": f"{kind}_vision"},
            {"image_token_id": _FIRST + 2, "scale_factor": 2, "tie_word_embeddings": False},
        )
        for kind in ("smolvlm", "idefics3")
    },
    "lfm2_vl": (
        {
            **_HYBRIDS["convolution"],
            **_WITH_KERNELS["convolution"],
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
        {
            **{name: value for name, value in _GEMMA_TOWER.items() if name != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 25,
        },
        {"image_token_id": _FIRST + 2, "projector_hidden_size": 48},
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 32, "rms_norm_eps": 1e-5},
        _PIXTRAL_TOWER,
        {"image_token_index": _FIRST + 2, "tie_word_embeddings": False},
    ),
}


def write_recipe(
    path: Path,
    *,
    target: Path,
    draft: Path | None = None,
    dtype: str = "float32",
    backend: str = 'name = "onnxruntime-cpu"',
    drafting: str = 'kind = "none"',
    window: int = 4,
    **limits: int,
) -> Path:
    """Write a recipe file for ``target`` with the draft model ``draft``, or with the table ``drafting``.

    ``limits`` override batch, length and prefill_chunk.
    """
    sizes = {"batch": 4, "length": 96, "prefill_chunk": 16, **limits}
    if draft:
        drafting = f'kind = "model"\ncheckpoint = "{draft}"\nnum_draft_tokens = {window}'
    path.write_text(
        f"""
name = "{path.stem}"
[target]
checkpoint = "{target}"
dtype = "{dtype}"
[draft]
{drafting}
[reasoning]
think_start = "<think>"
think_ends = ["</think>"]
forced_end = "enough.</think>"
implicit_ends = ["<tool_call>"]
[limits]
{chr(10).join(f"{key} = {value}" for key, value in sizes.items())}
[backend]
{backend}
"""
    )
    return path
