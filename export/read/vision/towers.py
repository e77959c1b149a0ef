"""Read the vision tower of a checkpoint: its sizes, its tensors and how it wants images. What is lacking is named."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from tandemrt.engines.contract.vision import Tiles, VisionEntry
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import Activation
from tandemrt.export.read.unused_fields import is_unused
from tandemrt.export.read.vision import kinds
from tandemrt.export.read.vision.processor import (
    TEXT_ONLY,
    colour,
    edge,
    image_processor,
    json_of,
    require_same,
    resample,
)
from tandemrt.export.read.vision.spec import VisionSpec
from tandemrt.export.read.vision_language import vision_language

_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}

_MOST_LAYERS = 10_000


def read_tower(checkpoint: Checkpoint, hidden: int) -> VisionSpec:
    """Read the tower of a checkpoint of TOWERS, whose decoder has ``hidden`` values per token.

    Raises BadCheckpoint for fields that are not implemented.
    """
    tower, where = checkpoint.config.get("vision_config"), "config.json: vision_config"
    if not isinstance(tower, Mapping):
        raise BadCheckpoint(f"{where} should be an object, it is {quoted(tower)}")
    architecture = str(vision_language(checkpoint.config))
    fields = Fields({**_DEFAULTS.get(architecture, {}), **tower}, where)
    fields.skip("model_type", *filter(is_unused, fields.data))
    spec = TOWERS[architecture](checkpoint, fields, hidden)
    fields.finish(advice=TEXT_ONLY)
    whole = spec.hidden % (4 * spec.heads) == 0
    fields.require("hidden_size", whole, f"a multiple of 4 values for each of {spec.heads} attention heads")
    return spec


def _tower(
    kind: kinds.TowerKind, fields: Fields, hidden: int, processor: Fields, entry: Mapping[str, Any], **differs: Any
) -> VisionSpec:
    """Return a tower of what all configs and image processors have, and what ``differs``; nothing else may be left."""
    layers, heads = (
        fields.integer(old if old in fields.data else name, most=_MOST_LAYERS)
        for old, name in (("depth", "num_hidden_layers"), ("num_heads", "num_attention_heads"))
    )
    size, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    # A layer holds its input and a norm, and queries, keys, values and their mix, or its MLP twice.
    common: dict[str, Any] = {"patch_values": 2 * size + max(4 * size, 2 * intermediate)}
    if "mean" not in entry:
        common |= {"mean": colour(processor, "image_mean"), "std": colour(processor, "image_std")}
    processor.finish(advice=TEXT_ONLY)
    read = VisionEntry(**common, **entry)
    return VisionSpec(kind, size, intermediate, layers, heads, out=hidden, entry=read, **differs)


def _qwen(
    kind: kinds.TowerKind, checkpoint: Checkpoint, fields: Fields, hidden: int, entry: Mapping[str, Any], **differs: Any
) -> VisionSpec:
    """Read what the towers of the Qwen families share; ``entry`` and ``differs``: what they do not."""
    fields.only("in_channels", 3)
    fields.require("out_hidden_size", fields.integer("out_hidden_size") == hidden, f"that of the text part, {hidden}")
    patch, merge, frames = (fields.integer(f"{name}_size") for name in ("patch", "spatial_merge", "temporal_patch"))
    processor = image_processor(checkpoint.folder, "Qwen2VL", "Qwen2_5_VL")
    require_same(processor, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames})
    least, most = edge(processor, "shortest_edge", "min_pixels"), edge(processor, "longest_edge", "max_pixels")
    token = _token(checkpoint.config, "image_token_id")
    shared = {"image_token": token, "position_rows": 3, **_cut(patch, merge, processor, 3), **_bounds(least, most)}
    how = {"frames": frames, "rope_theta": _rope_theta(fields, 10_000.0)}
    return _tower(kind, fields, hidden, processor, {**shared, **entry}, **how, **differs)


def _qwen2_5_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    patch, merge = fields.integer("patch_size", 14), fields.integer("spatial_merge_size", 2)
    window, layers = fields.integer("window_size", 112), fields.integer("depth", most=_MOST_LAYERS)
    whole = fields.get("fullatt_block_indexes")
    fields.require("window_size", window % (patch * merge) == 0, f"a multiple of {patch * merge}")
    known = isinstance(whole, list) and all(type(layer) is int and 0 <= layer < layers for layer in whole)
    fields.require("fullatt_block_indexes", known, f"layers below {layers}")
    fields.only("in_chans", 3)
    fields.only("spatial_patch_size", patch)
    fields.skip("tokens_per_second")  # of videos
    windows = tuple(layer for layer in range(layers) if layer not in whole)
    how = {"window_layers": windows, "activation": _activation(fields, "hidden_act", "silu")}
    return _qwen(kinds.QWEN2_5_VL, checkpoint, fields, hidden, {"window_side": window // (patch * merge)}, **how)


def _qwen3_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    taps, positions = fields.get("deepstack_visual_indexes", ()), fields.integer("num_position_embeddings")
    layers, side = fields.integer("depth"), isqrt(positions)
    fields.require("num_position_embeddings", side**2 == positions, "a square")
    known = isinstance(taps, list | tuple) and all(isinstance(tap, int) and 0 <= tap < layers for tap in taps)
    ascending = known and list(taps) == sorted(set(taps))
    fields.require("deepstack_visual_indexes", ascending, f"layers below {layers}, ascending")
    activation = _activation(fields, "hidden_act", "gelu_pytorch_tanh", "gelu")
    how = {"activation": activation, "positions": positions, "taps": tuple(taps)}
    return _qwen(kinds.QWEN3_VL, checkpoint, fields, hidden, {"grid_side": side}, **how)


def _siglip(
    kind: kinds.TowerKind, fields: Fields, hidden: int, processor: Fields, entry: Mapping[str, Any], **differs: Any
) -> VisionSpec:
    """Read SigLIP (Zhai et al., 2023) without its pooling head. ``entry``, ``differs``: what families do not share."""
    fields.only("num_channels", 3)
    fields.skip("vision_use_head")
    activation = _activation(fields, "hidden_act", "gelu_pytorch_tanh", "gelu")
    how = {"activation": activation, "norm_eps": fields.number("layer_norm_eps", 1e-6), **differs}
    return _tower(kind, fields, hidden, processor, entry, positions=entry["grid_side"] ** 2, **how)


def _gemma3(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    fields.only("model_type", "siglip_vision_model")
    config, side, patch = checkpoint.config, fields.integer("image_size"), fields.integer("patch_size")
    tokens = Fields(config, "config.json").integer("mm_tokens_per_image", 256)
    grid = side // patch
    merge = grid // max(1, isqrt(tokens))
    whole = grid * patch == side and (grid // max(1, merge)) ** 2 == tokens and merge * isqrt(tokens) == grid
    fields.require("image_size", whole, f"a square of {tokens} (mm_tokens_per_image) squares of patches of {patch}")
    processor = image_processor(checkpoint.folder, "Gemma3")
    processor.only("do_pan_and_scan", False)
    processor.skip(*(f"pan_and_scan_{name}" for name in ("max_num_crops", "min_crop_size", "min_ratio_to_activate")))
    require_same(processor, {"size": {"height": side, "width": side}})
    token = _token(config, "image_token_index", "image_token_id")
    begin, image, end = _special(
        checkpoint, _token(config, "boi_token_index"), token, _token(config, "eoi_token_index")
    )
    prompt = _prompt(token, begin, f"\n\n{begin}{image}{end}\n\n")
    entry = {**prompt, **_cut(patch, merge, processor, 2), **_square(side, grid), "both_ways": True}
    return _siglip(kinds.SIGLIP, fields, hidden, processor, entry, image_attention="all")


def _idefics3(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    """Read the tower of Idefics 3 (Laurençon et al., 2024), SmolVLM and SmolVLM 2."""
    merge = Fields(checkpoint.config, "config.json").integer("scale_factor", 2)
    side, patch = fields.integer("image_size"), fields.integer("patch_size")
    grid = side // patch
    fields.require("image_size", grid > 0 and grid % merge == 0, f"{merge} patches of {patch} pixels or a multiple")
    fields.skip("max_image_size", "size", "use_base_siglip", "tie_word_embeddings")  # of the image processor, or unused
    processor = image_processor(checkpoint.folder, "Idefics3", "SmolVLM", without=("do_pad", "video_sampling"))
    processor.only("do_image_splitting", True)
    processor.skip("return_row_col_info")
    tile, longest = edge(processor, "longest_edge", of="max_image_size"), edge(processor, "longest_edge")
    processor.require("max_image_size", tile == side, f"that of the tower's images, {side}")
    processor.require("size", side <= longest <= 4096, f"from {side} to 4096 pixels")
    token, around, all_of_it = _token(checkpoint.config, "image_token_id"), "<fake_token_around_image>", "<global-img>"
    image, _, _ = _special(checkpoint, token, around, all_of_it)
    before: dict[str, Any] = {"before_tile": f"{around}<row_{{row}}_col_{{column}}>", "after_row": "\n"}
    tiles = Tiles(
        side=side, longest=longest, **before, before_all=f"\n{around}{all_of_it}", before_uncut=around + all_of_it
    )
    prompt = _prompt(token, image, image + around)
    entry = {**prompt, **_cut(patch, merge, processor, 1), **_square(side, grid), "tiles": tiles}
    return _siglip(kinds.IDEFICS3, fields, hidden, processor, entry, merger_bias=False)


def _lfm2_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    """Read LFM2-VL's tower, SigLIP 2 (Tschannen et al., 2025)."""
    outer, patch = Fields(checkpoint.config, "config.json"), fields.integer("patch_size", 16)
    positions, merge = fields.integer("num_patches", 256), outer.integer("downsample_factor", 2)
    fields.require("num_patches", isqrt(positions) ** 2 == positions, "a square")
    outer.only("vision_feature_layer", -1)
    outer.only("projector_hidden_act", "gelu")
    processor = image_processor(checkpoint.folder, "Lfm2Vl", without=("do_resize", "do_pad", "size", "max_num_patches"))
    require_same(processor, {"encoder_patch_size": patch, "patch_size": patch, "downsample_factor": merge})
    processor.only("do_image_splitting", True)
    processor.only("max_pixels_tolerance", 2.0)
    processor.skip("return_row_col_info")
    factor, side, least = patch * merge, processor.integer("tile_size", 512), processor.integer("min_tiles", 2)
    fewest, most = processor.integer("min_image_tokens", 64), processor.integer("max_image_tokens", 256)
    whole = side % factor == 0 and side**2 <= most * factor**2
    processor.require("tile_size", whole, f"a multiple of {factor}, with at most {most} tokens (max_image_tokens)")
    processor.require("min_tiles", least > 1, "at least 2")
    around = Fields(json_of(checkpoint.folder / "processor_config.json") or {}, "processor_config.json")
    around.only("use_image_special_tokens", True)
    token = _token(checkpoint.config, "image_token_id", "image_token_index")
    names = "image_start", "image_end", "img_thumbnail"
    begin, end, all_of_it = (f"<|{name}|>" for name in names)
    image, *_ = _special(checkpoint, token, begin, end, all_of_it)
    before_all = all_of_it if processor.flag("use_thumbnail", True) else None
    before: dict[str, Any] = {"before_tile": "<|img_row_{row}_col_{column}|>", "before_all": before_all}
    entry = {
        **_prompt(token, image, begin + image + end),
        **_cut(patch, merge, processor, 2),
        **_bounds(fewest * factor**2, most * factor**2),
        "grid_side": isqrt(positions),
        "grid_corners": False,
        "tiles": Tiles(side=side, least=least, most=processor.integer("max_tiles", 10), **before),
    }
    norm, *linears = kinds.LFM2_VL.parts
    parts = (norm if outer.flag("projector_use_layernorm", True) else "", *linears)
    wide, bias = outer.integer("projector_hidden_size", 2560), outer.flag("projector_bias", True)
    how = {"merger_hidden": wide, "merger_bias": bias, "merger_eps": 1e-5}
    return _siglip(replace(kinds.LFM2_VL, parts=parts), fields, hidden, processor, entry, **how)


def _gemma4(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    """Read Gemma 4's tower, which scales images to a number of tokens and keeps their shape."""
    config, patch, merge = checkpoint.config, fields.integer("patch_size", 16), fields.integer("pooling_kernel_size", 3)
    heads, positions = fields.integer("num_attention_heads"), fields.integer("position_embedding_size", 10_240)
    fields.only("num_key_value_heads", heads)
    for name in ("head_dim", "global_head_dim"):
        fields.only(name, fields.integer("hidden_size") // heads)
    fields.only("attention_bias", False)
    fields.skip("max_position_embeddings", "default_output_length")  # the image processor has the number of tokens
    processor = image_processor(checkpoint.folder, "Gemma4", without=("do_normalize", "do_pad"))
    processor.only("do_normalize", False)
    processor.skip("image_mean", "image_std", "size")  # of steps that are off
    require_same(processor, {"patch_size": patch, "pooling_kernel_size": merge})
    tokens = processor.integer("max_soft_tokens", 280)
    enough, rule = tokens * merge <= positions, f"at least {tokens * merge}, for {tokens} squares of patches in a row"
    fields.require("position_embedding_size", enough, rule)
    token, last = _token(config, "image_token_id"), _token(config, "eoi_token_id", "eoi_token_index")
    begin, image, end = _special(checkpoint, _token(config, "boi_token_id"), token, last)
    text = config.get("text_config")
    sliding = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    entry = {
        **_prompt(token, image, begin + image + end),
        **_cut(patch, merge, processor, 3),
        "resize": "fill",
        "max_pixels": tokens * (patch * merge) ** 2,
        "both_ways": sliding,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),  # the tower reads colours from -1 to 1
    }
    how = {"activation": _activation(fields, "hidden_activation", "gelu_pytorch_tanh"), "positions": positions}
    flags = {"clipped": fields.flag("use_clipped_linears", False), "standardized": fields.flag("standardize", False)}
    sizes = {"norm_eps": fields.number("rms_norm_eps", 1e-6), "rope_theta": _rope_theta(fields, 100.0)}
    attention = "sliding" if sliding else "none"
    return _tower(kinds.GEMMA4, fields, hidden, processor, entry, image_attention=attention, **how, **flags, **sizes)


def _pixtral(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    """Read the tower of Mistral Small 3.1 and later, and of Ministral 3: Pixtral (Agrawal et al., 2024)."""
    outer, patch = Fields(checkpoint.config, "config.json"), fields.integer("patch_size", 16)
    merge, side = outer.integer("spatial_merge_size", 2), fields.integer("image_size", 1024)
    outer.only("vision_feature_layer", -1)
    outer.only("projector_hidden_act", "gelu")
    fields.only("num_channels", 3)
    fields.only("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    processor = image_processor(checkpoint.folder, "Pixtral", without=("do_pad",))
    processor.skip("patch_size")  # that of the tower's and the merger's counts
    longest = edge(processor, "longest_edge")
    fits = longest % (patch * merge) == 0 and longest <= side
    processor.require("size", fits, f"a multiple of {patch * merge} pixels and at most image_size, {side}")
    around = json_of(checkpoint.folder / "processor_config.json") or {}
    require_same(Fields(around, "processor_config.json"), {"patch_size": patch, "spatial_merge_size": merge})
    token = _token(checkpoint.config, "image_token_index", "image_token_id")
    names = {"image_end_token": "[IMG_END]", "image_break_token": "[IMG_BREAK]"}
    end, line = (str(around.get(name, text)) for name, text in names.items())
    image, image_break, _ = _special(checkpoint, token, line, end)
    sizes = {"image_break": image_break, "resize": "edge", "max_pixels": longest**2}
    entry = {**_prompt(token, image, image + end), **_cut(patch, merge, processor, 3), **sizes}
    text = checkpoint.config.get("text_config")
    text_eps = Fields(text if isinstance(text, Mapping) else {}, "text_config").number("rms_norm_eps", 1e-5)
    how = {"activation": _activation(fields, "hidden_act", "gelu", "silu", "gelu_pytorch_tanh")}
    norms = {"norm_eps": 1e-5, "merger_eps": text_eps}  # no config names the first one
    rope, bias = _rope_theta(fields, 10_000.0), outer.flag("multimodal_projector_bias", False)
    return _tower(kinds.PIXTRAL, fields, hidden, processor, entry, rope_theta=rope, merger_bias=bias, **how, **norms)


_Reader = Callable[[Checkpoint, Fields, int], VisionSpec]
_IDEFICS = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_LFM2_VL = "Lfm2VlForConditionalGeneration"
TOWERS: Mapping[str, _Reader] = {
    **{f"Qwen3{kind}ForConditionalGeneration": _qwen3_vl for kind in ("VL", "VLMoe", "_5", "_5Moe")},
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Mistral3ForConditionalGeneration": _pixtral,
    **dict.fromkeys(_IDEFICS, _idefics3),
    _LFM2_VL: _lfm2_vl,
}
_SIZES = {"intermediate_size": 3072, "num_hidden_layers": 12}
_IDEFICS_SIZES = {**_SIZES, "hidden_size": 1152, "num_attention_heads": 16, "image_size": 224, "patch_size": 32}
# Fields that transformers adds to a config without them.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    _LFM2_VL: {**_SIZES, "hidden_size": 768, "num_attention_heads": 12},
    **dict.fromkeys(_IDEFICS, _IDEFICS_SIZES),
}
# Prefixes of a tower's tensors, current and old, and parts that no image token needs.
_PREFIX = re.compile(
    r"(?:model\.)?(?:visual\.|vision_tower\.(?:vision_model\.)?|vision_model\.|"
    r"(?=(?:multi_modal_projector|embed_vision|connector)\.))"
)
_UNUSED_PART = re.compile(r"head\.")


def tower_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors of the tower by their names in it."""
    names = {name: _PREFIX.sub("", name, count=1) for name in checkpoint.tensors if _PREFIX.match(name)}
    return {
        own: replace(checkpoint.tensors[name], name=own) for name, own in names.items() if not _UNUSED_PART.match(own)
    }


def _prompt(token: int, written: str, replaced: str) -> dict[str, Any]:
    """Return the token of an image, what a chat template writes for it, and what takes its place."""
    return {"image_token": token, "template_text": written, "prompt_text": replaced}


def _cut(patch: int, merge: int, processor: Fields, default: int) -> dict[str, Any]:
    """Return how images become patches, and the filter that resizes them; ``default``: as Pillow counts."""
    return {"patch_size": patch, "merge_size": merge, "resample": resample(processor, default)}


def _bounds(least: int, most: int) -> dict[str, Any]:
    """Return how images are resized to any number of pixels within bounds."""
    return {"resize": "bounds", "min_pixels": least, "max_pixels": most}


def _square(side: int, grid: int) -> dict[str, Any]:
    """Return how images become squares of ``side`` pixels and ``grid`` learned positions."""
    return {"resize": "square", "min_pixels": side**2, "max_pixels": side**2, "grid_side": grid}


def _activation(fields: Fields, name: str, *allowed: str) -> Activation:
    """Return an activation of those ``allowed``; the first one is the default."""
    fields.only(name, *allowed)
    return _ACTIVATIONS[fields.get(name, allowed[0])]


def _rope_theta(fields: Fields, default: float) -> float:
    rope = fields.get("rope_parameters", {})
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise BadCheckpoint(f"{fields.where}.rope_parameters should be of type axial, it is {quoted(rope)}")
    return Fields({"rope_theta": fields.get("rope_theta"), **rope}, fields.where).number("rope_theta", default)


def _token(config: Mapping[str, Any], *names: str) -> int:
    """Return the token id in the first of the fields ``names`` that ``config`` has."""
    name = next((name for name in names if name in config), names[0])
    token = config.get(name)
    if type(token) is not int or token < 0:
        raise BadCheckpoint(f"config.json: {name} should be a token id, it is {quoted(token)}")
    return token


def _special(checkpoint: Checkpoint, *tokens: str | int) -> list[Any]:
    """Return the ids of special tokens that are texts, and the texts of those that are ids."""
    added = (json_of(checkpoint.folder / "tokenizer.json") or {}).get("added_tokens")
    known: dict[Any, Any] = {}
    for entry in added if isinstance(added, list) else ():
        text, token = (entry.get(name) if isinstance(entry, Mapping) else None for name in ("content", "id"))
        if isinstance(text, str) and type(token) is int:
            known |= {text: token, token: text}
    if (missing := next((token for token in tokens if token not in known), None)) is not None:
        raise BadCheckpoint(f"tokenizer.json should have the special token {quoted(missing)} of images, it has none")
    return [known[token] for token in tokens]
