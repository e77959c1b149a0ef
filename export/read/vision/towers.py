"""Read the vision tower of a checkpoint: its sizes, its tensors and how it wants images. What is lacking is named."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import Activation
from tandemrt.export.read.unused_fields import is_unused
from tandemrt.export.read.vision.processor import (
    TEXT_ONLY,
    colour,
    edge,
    image_processor,
    json_of,
    require_same,
    resample,
)
from tandemrt.export.read.vision.spec import TowerNames, VisionSpec
from tandemrt.export.read.vision_language import vision_language

_PROJECTOR = "multi_modal_projector."
_QWEN3_VL = TowerNames(
    patches="patch_embed.proj", positions="pos_embed.weight", layer="blocks", norms=("norm1", "norm2"),
    qkv=("attn.qkv",), out="attn.proj", mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
    merger=("norm", "linear_fc1", "linear_fc2"),
)  # fmt: skip
_QWEN2_5_VL = replace(
    _QWEN3_VL, positions="", mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), merger=("ln_q", "mlp.0", "mlp.2")
)
_SIGLIP = TowerNames(
    patches="embeddings.patch_embedding", positions="embeddings.position_embedding.weight", layer="encoder.layers",
    norms=("layer_norm1", "layer_norm2"), qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj", mlp=("mlp.fc1", "mlp.fc2"),
    merger=("post_layernorm", f"{_PROJECTOR}mm_soft_emb_norm.weight", f"{_PROJECTOR}mm_input_projection_weight"),
)  # fmt: skip
_GEMMA4 = TowerNames(
    patches="patch_embedder.input_proj", positions="patch_embedder.position_embedding_table", layer="encoder.layers",
    norms=("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    head_norms=("self_attn.q_norm.weight", "self_attn.k_norm.weight"), out="self_attn.o_proj.linear",
    mlp=("mlp.gate_proj.linear", "mlp.up_proj.linear", "mlp.down_proj.linear"),
    merger=("std_bias", "std_scale", "embed_vision.embedding_projection"),
)  # fmt: skip
_PIXTRAL = TowerNames(
    patches="patch_conv", first_norm="ln_pre", layer="transformer.layers", norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), out="attention.o_proj",
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    merger=tuple(_PROJECTOR + name for name in ("norm", "patch_merger.merging_layer", "linear_1", "linear_2")),
)  # fmt: skip
_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


def read_tower(checkpoint: Checkpoint, hidden: int) -> VisionSpec:
    """Read the tower of a checkpoint of TOWERS, whose decoder has ``hidden`` values per token.

    Raises BadCheckpoint for fields that are not implemented.
    """
    tower, where = checkpoint.config.get("vision_config"), "config.json: vision_config"
    if not isinstance(tower, Mapping):
        raise BadCheckpoint(f"{where} should be an object, it is {quoted(tower)}")
    fields = Fields(dict(tower), where)
    fields.skip("model_type", *filter(is_unused, fields.data))
    spec = TOWERS[str(vision_language(checkpoint.config))](checkpoint, fields, hidden)
    fields.finish(advice=TEXT_ONLY)
    if spec.hidden % (4 * spec.heads):
        raise BadCheckpoint(
            f"{where}.hidden_size should be a multiple of 4 values for each attention head, it is {spec.hidden} "
            f"for {spec.heads} heads"
        )
    return spec


def _tower(fields: Fields, hidden: int, processor: Fields, entry: Mapping[str, Any], **differs: Any) -> VisionSpec:
    """Return a tower of what all configs and image processors have, and what ``differs``; nothing else may be left."""
    layers, heads = (
        fields.integer(old if old in fields.data else name)
        for old, name in (("depth", "num_hidden_layers"), ("num_heads", "num_attention_heads"))
    )
    size, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    # A layer holds its input and a norm, and queries, keys, values and their mix, or its MLP twice.
    common: dict[str, Any] = {"patch_values": 2 * size + max(4 * size, 2 * intermediate)}
    if "mean" not in entry:
        common |= {"mean": colour(processor, "image_mean"), "std": colour(processor, "image_std")}
    processor.finish(advice=TEXT_ONLY)
    return VisionSpec(
        hidden=size,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        out=hidden,
        entry=VisionEntry(**common, **entry),
        **differs,
    )


def _qwen(checkpoint: Checkpoint, fields: Fields, hidden: int, entry: Mapping[str, Any], **differs: Any) -> VisionSpec:
    """Read what the towers of the Qwen families share; ``entry`` and ``differs``: what they do not."""
    fields.only("in_channels", 3)
    if (out := fields.integer("out_hidden_size")) != hidden:
        raise BadCheckpoint(f"{fields.where}.out_hidden_size should be that of the text part, {hidden}, it is {out}")
    patch, merge, frames = (fields.integer(f"{name}_size") for name in ("patch", "spatial_merge", "temporal_patch"))
    processor = image_processor(checkpoint.folder, "Qwen2VL")
    require_same(processor, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames})
    shared = {
        "image_token": _token(checkpoint.config, "image_token_id"),
        "position_rows": 3,
        "patch_size": patch,
        "merge_size": merge,
        "resize": "bounds",
        "min_pixels": edge(processor, "shortest_edge", "min_pixels"),
        "max_pixels": edge(processor, "longest_edge", "max_pixels"),
        "resample": resample(processor, 3),
    }
    rope = {"rope": "halves", "rope_theta": _rope_theta(fields, 10_000.0)}
    return _tower(fields, hidden, processor, {**shared, **entry}, frames=frames, merger="joined", **rope, **differs)


def _qwen2_5_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    patch, merge = (fields.integer(name, default) for name, default in (("patch_size", 14), ("spatial_merge_size", 2)))
    window, layers = fields.integer("window_size", 112), fields.integer("depth")
    whole = fields.get("fullatt_block_indexes")
    if window % (patch * merge):
        raise BadCheckpoint(f"{fields.where}.window_size should be a multiple of {patch * merge}, it is {window}")
    if not isinstance(whole, list) or not all(type(layer) is int and 0 <= layer < layers for layer in whole):
        raise BadCheckpoint(
            f"{fields.where}.fullatt_block_indexes should be layers below {layers}, it is {quoted(whole)}"
        )
    fields.only("in_chans", 3)
    fields.only("spatial_patch_size", patch)
    fields.skip("tokens_per_second")  # of videos
    return _qwen(
        checkpoint,
        fields,
        hidden,
        {"window_side": window // (patch * merge)},
        names=_QWEN2_5_VL,
        activation=_activation(fields, "hidden_act", "silu"),
        window_layers=tuple(layer for layer in range(layers) if layer not in whole),
        rms_norms=True,
        patch_bias=False,
    )


def _qwen3_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    taps, positions = fields.get("deepstack_visual_indexes", ()), fields.integer("num_position_embeddings")
    layers, side = fields.integer("depth"), isqrt(positions)
    if side**2 != positions:
        raise BadCheckpoint(f"{fields.where}.num_position_embeddings should be a square, it is {positions}")
    known = isinstance(taps, list | tuple) and all(isinstance(tap, int) and 0 <= tap < layers for tap in taps)
    if not known or list(taps) != sorted(set(taps)):
        raise BadCheckpoint(
            f"{fields.where}.deepstack_visual_indexes should be layers below {layers}, ascending, it is {quoted(taps)}"
        )
    activation = _activation(fields, "hidden_act", "gelu_pytorch_tanh", "gelu")
    how = {"names": _QWEN3_VL, "activation": activation, "positions": positions, "taps": tuple(taps)}
    return _qwen(checkpoint, fields, hidden, {"grid_side": side}, **how)


def _gemma3(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    """Read SigLIP (Zhai et al., 2023) without its pooling head."""
    fields.only("model_type", "siglip_vision_model")
    fields.only("num_channels", 3)
    fields.skip("vision_use_head")
    config, side, patch = checkpoint.config, fields.integer("image_size"), fields.integer("patch_size")
    tokens = Fields(config, "config.json").integer("mm_tokens_per_image", 256)
    grid = side // patch
    merge = grid // max(1, isqrt(tokens))
    if grid * patch != side or (grid // max(1, merge)) ** 2 != tokens or merge * isqrt(tokens) != grid:
        raise BadCheckpoint(
            f"{fields.where}.image_size should be a square of mm_tokens_per_image squares of patches, it is {side} for "
            f"{tokens} tokens and patches of {patch} pixels"
        )
    processor = image_processor(checkpoint.folder, "Gemma3")
    processor.only("do_pan_and_scan", False)
    processor.skip(*(f"pan_and_scan_{name}" for name in ("max_num_crops", "min_crop_size", "min_ratio_to_activate")))
    require_same(processor, {"size": {"height": side, "width": side}})
    entry = {
        "image_token": _token(config, "image_token_index", "image_token_id"),
        "image_begin": _token(config, "boi_token_index"),
        "image_end": _token(config, "eoi_token_index"),
        "template_token": _token(config, "boi_token_index"),
        "both_ways": True,
        "patch_size": patch,
        "merge_size": merge,
        "grid_side": grid,
        "resize": "square",
        "min_pixels": side**2,
        "max_pixels": side**2,
        "resample": resample(processor, 2),
    }
    return _tower(
        fields,
        hidden,
        processor,
        entry,
        names=_SIGLIP,
        activation=_activation(fields, "hidden_act", "gelu_pytorch_tanh", "gelu"),
        positions=grid**2,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        merger="mean",
        image_attention="all",
    )


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
    if tokens * merge > positions:
        raise BadCheckpoint(
            f"{fields.where}.position_embedding_size should be at least {tokens * merge}, for an image of {tokens} "
            f"squares of patches in a row, it is {positions}"
        )
    text = config.get("text_config")
    sliding = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    entry = {
        "image_token": _token(config, "image_token_id"),
        "image_begin": _token(config, "boi_token_id"),
        "image_end": _token(config, "eoi_token_id", "eoi_token_index"),
        "both_ways": sliding,
        "patch_size": patch,
        "merge_size": merge,
        "resize": "fill",
        "max_pixels": tokens * (patch * merge) ** 2,
        "resample": resample(processor, 3),
        "mean": (0.5, 0.5, 0.5),  # the tower reads colours from -1 to 1
        "std": (0.5, 0.5, 0.5),
    }
    return _tower(
        fields,
        hidden,
        processor,
        entry,
        names=_GEMMA4,
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rms_norms=True,
        biases=False,
        patch_bias=False,
        colours_last=True,
        positions=positions,
        rope="parts",
        rope_theta=_rope_theta(fields, 100.0),
        unscaled=True,
        clipped=fields.flag("use_clipped_linears", False),
        standardized=fields.flag("standardize", False),
        merger="pooled",
        image_attention="sliding" if sliding else "none",
    )


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
    if longest % (patch * merge) or longest > side:
        raise BadCheckpoint(
            f"{processor.where}: longest_edge of size should be a multiple of {patch * merge} pixels and at most "
            f"image_size, {side}, it is {longest}"
        )
    around = json_of(checkpoint.folder / "processor_config.json") or {}
    require_same(Fields(around, "processor_config.json"), {"patch_size": patch, "spatial_merge_size": merge})
    entry = {
        "image_token": _token(checkpoint.config, "image_token_index", "image_token_id"),
        "image_break": _added_token(checkpoint, around.get("image_break_token", "[IMG_BREAK]")),
        "image_end": _added_token(checkpoint, around.get("image_end_token", "[IMG_END]")),
        "patch_size": patch,
        "merge_size": merge,
        "resize": "edge",
        "max_pixels": longest**2,
        "resample": resample(processor, 3),
    }
    text = checkpoint.config.get("text_config")
    return _tower(
        fields,
        hidden,
        processor,
        entry,
        names=_PIXTRAL,
        activation=_activation(fields, "hidden_act", "gelu", "silu", "gelu_pytorch_tanh"),
        norm_eps=1e-5,  # which no config names
        merger_eps=Fields(text if isinstance(text, Mapping) else {}, "text_config").number("rms_norm_eps", 1e-5),
        rms_norms=True,
        biases=False,
        patch_bias=False,
        merger_bias=outer.flag("multimodal_projector_bias", False),
        rope="alternating",
        rope_theta=_rope_theta(fields, 10_000.0),
        merger="matmul",
    )


_Reader = Callable[[Checkpoint, Fields, int], VisionSpec]
TOWERS: Mapping[str, _Reader] = {
    **{f"Qwen3{kind}ForConditionalGeneration": _qwen3_vl for kind in ("VL", "VLMoe", "_5", "_5Moe")},
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Mistral3ForConditionalGeneration": _pixtral,
}
# Prefixes of a tower's tensors, current and old, and parts that no image token needs.
_PREFIX = re.compile(
    r"(?:model\.)?(?:visual\.|vision_tower\.(?:vision_model\.)?|(?=multi_modal_projector\.)|(?=embed_vision\.))"
)
_UNUSED_PART = re.compile(r"head\.")


def tower_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors of the tower by their names in it."""
    names = {name: _PREFIX.sub("", name, count=1) for name in checkpoint.tensors if _PREFIX.match(name)}
    return {
        own: replace(checkpoint.tensors[name], name=own) for name, own in names.items() if not _UNUSED_PART.match(own)
    }


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


def _added_token(checkpoint: Checkpoint, text: Any) -> int:
    """Return the id of a special token by its ``text``."""
    added = (json_of(checkpoint.folder / "tokenizer.json") or {}).get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and token.get("content") == text:
            return _token(token, "id")
    raise BadCheckpoint(f"tokenizer.json should have the special token {quoted(text)} of images, it has none")
