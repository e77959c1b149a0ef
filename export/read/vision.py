"""Read the vision tower of a checkpoint: its sizes, its tensors and how it wants images. What is lacking is named."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.unused_fields import is_unused
from tandemrt.export.read.vision_language import vision_language

_TEXT_ONLY = "leave target.images out, and the bundle reads text only"
_RESAMPLE: Mapping[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # as Pillow counts
# Fields of image processors that change nothing for one still image.
_UNUSED = frozenset((
    "processor_class", "data_format", "input_data_format", "device", "return_tensors", "disable_grouping",
    "default_to_square", "image_seq_length",
))  # fmt: skip


@dataclass(frozen=True)
class TowerNames:
    """Names of a tower's tensors; those of a layer follow ``layer`` and its number. ``qkv``: one weight, or three.

    ``mlp``: up and down, or gate, up and down. ``merger``: the norm and two matmuls.
    """

    patches: str
    positions: str
    layer: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, ...]
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")


_QWEN3_VL = TowerNames(
    patches="patch_embed.proj",
    positions="pos_embed.weight",
    layer="blocks",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
)
_QWEN2_5_VL = replace(
    _QWEN3_VL, positions="", mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), merger=("ln_q", "mlp.0", "mlp.2")
)
_SIGLIP = TowerNames(
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    layer="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


@dataclass(frozen=True)
class VisionSpec:
    """Sizes of a tower: a transformer over patches, and a merger of neighbouring patches into tokens of the decoder.

    ``taps``: layers whose streams have mergers of their own (DeepStack). ``frames``: of a patch; those of a still image
    are equal; 0: patches have no such dimension. ``positions``: rows of the table of learned positions; 0: none.
    ``whole_layers``: those that attend to all patches, and not within windows. ``rope_theta``: of rotations by row and
    column; None: there are none. ``merger``: an MLP over the joined patches of a square, or the mean of its patches,
    normed and projected.
    """

    names: TowerNames
    hidden: int
    intermediate: int
    layers: int
    heads: int
    out: int
    taps: tuple[int, ...]
    frames: int
    positions: int
    approximate: Literal["none", "tanh"]
    rope_theta: float | None
    norm_eps: float
    whole_layers: tuple[int, ...]
    merger: Literal["joined", "mean"]
    entry: VisionEntry
    rms_norms: bool = False
    patch_bias: bool = True

    @property
    def pixels(self) -> int:
        """Colours of a patch."""
        return 3 * self.entry.patch_size**2

    @property
    def levels(self) -> int:
        """Mergers: the last one, and one for each tap."""
        return 1 + len(self.taps)

    @classmethod
    def from_hf(cls, checkpoint: Checkpoint, hidden: int) -> "VisionSpec":
        """Read the tower of a checkpoint of TOWERS, whose decoder has ``hidden`` values per token.

        Raises BadCheckpoint for fields that are not implemented.
        """
        tower, where = checkpoint.config.get("vision_config"), "config.json: vision_config"
        if not isinstance(tower, Mapping):
            raise BadCheckpoint(f"{where} should be an object, it is {quoted(tower)}")
        fields = Fields(dict(tower), where)
        fields.skip("model_type", *filter(is_unused, fields.data))
        spec = TOWERS[str(vision_language(checkpoint.config))](checkpoint, fields, hidden)
        fields.finish(advice=_TEXT_ONLY)
        if spec.hidden % (4 * spec.heads):
            raise BadCheckpoint(
                f"{where}.hidden_size should be a multiple of 4 values for each attention head, it is {spec.hidden} "
                f"for {spec.heads} heads"
            )
        return spec


def _qwen_entry(checkpoint: Checkpoint, fields: Fields, positions: int, window_side: int) -> VisionEntry:
    """Read how images become patches in the Qwen families."""
    fields.only("in_channels", 3)
    rope = fields.get("rope_parameters", None) or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") != "axial":
        raise BadCheckpoint(f"{fields.where}.rope_parameters should be of type axial, it is {quoted(rope)}")
    patch, merge, frames = (fields.integer(f"{name}_size") for name in ("patch", "spatial_merge", "temporal_patch"))
    processor = _preprocessor(checkpoint.folder, "Qwen2VL")
    for own, wanted in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
        if processor.get(own, wanted) != wanted:
            raise BadCheckpoint(
                f"{processor.where}: {own} should be the tower's, {wanted}, it is {quoted(processor.get(own))}"
            )
    entry = VisionEntry(
        image_token=_token(checkpoint.config, "image_token_id"),
        image_begin=None,
        image_end=None,
        position_rows=3,
        both_ways=False,
        patch_values=_patch_values(fields),
        patch_size=patch,
        merge_size=merge,
        grid_side=isqrt(positions),
        window_side=window_side,
        side=None,
        min_pixels=_bound(processor, "min_pixels", "shortest_edge"),
        max_pixels=_bound(processor, "max_pixels", "longest_edge"),
        resample=_resample(processor, 3),
        mean=_colour(processor, "image_mean"),
        std=_colour(processor, "image_std"),
    )
    processor.finish(advice=_TEXT_ONLY)
    return entry


def _qwen(fields: Fields, hidden: int, entry: VisionEntry) -> VisionSpec:
    """Read what the towers of the Qwen families have in common; the other fields are those of a plain tower."""
    if (out := fields.integer("out_hidden_size")) != hidden:
        raise BadCheckpoint(f"{fields.where}.out_hidden_size should be that of the text part, {hidden}, it is {out}")
    layers = fields.integer("depth")
    return VisionSpec(
        names=_QWEN3_VL,
        hidden=fields.integer("hidden_size"),
        intermediate=fields.integer("intermediate_size"),
        layers=layers,
        heads=fields.integer("num_heads"),
        out=hidden,
        taps=(),
        frames=fields.integer("temporal_patch_size"),
        positions=0,
        approximate="none",
        rope_theta=float((fields.get("rope_parameters") or {}).get("rope_theta", 10_000.0)),
        norm_eps=1e-6,  # which no config names
        whole_layers=tuple(range(layers)),
        merger="joined",
        entry=entry,
    )


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
    fields.only("hidden_act", "silu")
    fields.only("in_chans", 3)
    fields.only("spatial_patch_size", patch)
    fields.skip("tokens_per_second")  # of videos
    spec = _qwen(fields, hidden, _qwen_entry(checkpoint, fields, 0, window // (patch * merge)))
    return replace(spec, names=_QWEN2_5_VL, whole_layers=tuple(whole), rms_norms=True, patch_bias=False)


def _qwen3_vl(checkpoint: Checkpoint, fields: Fields, hidden: int) -> VisionSpec:
    taps, positions = fields.get("deepstack_visual_indexes", ()), fields.integer("num_position_embeddings")
    spec = replace(
        _qwen(fields, hidden, _qwen_entry(checkpoint, fields, positions, 0)),
        taps=tuple(taps) if isinstance(taps, list | tuple) else (-1,),
        positions=positions,
        approximate=_gelu(fields),
    )
    if isqrt(positions) ** 2 != positions:
        raise BadCheckpoint(f"{fields.where}.num_position_embeddings should be a square, it is {positions}")
    known = all(isinstance(tap, int) and 0 <= tap < spec.layers for tap in spec.taps)
    if not known or list(spec.taps) != sorted(set(spec.taps)):
        raise BadCheckpoint(
            f"{fields.where}.deepstack_visual_indexes should be layers below {spec.layers}, ascending, it is "
            f"{quoted(list(spec.taps))}"
        )
    return spec


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
    processor = _preprocessor(checkpoint.folder, "Gemma3")
    processor.only("do_pan_and_scan", False)
    processor.skip(*(f"pan_and_scan_{name}" for name in ("max_num_crops", "min_crop_size", "min_ratio_to_activate")))
    if processor.get("size") != {"height": side, "width": side}:
        raise BadCheckpoint(
            f"{processor.where}: size should be the tower's, {side} x {side}, it is {quoted(processor.get('size'))}"
        )
    entry = VisionEntry(
        image_token=_token(config, "image_token_index", "image_token_id"),
        image_begin=_token(config, "boi_token_index"),
        image_end=_token(config, "eoi_token_index"),
        position_rows=0,
        both_ways=True,
        patch_values=_patch_values(fields),
        patch_size=patch,
        merge_size=merge,
        grid_side=grid,
        window_side=0,
        side=side,
        min_pixels=side**2,
        max_pixels=side**2,
        resample=_resample(processor, 2),
        mean=_colour(processor, "image_mean"),
        std=_colour(processor, "image_std"),
    )
    processor.finish(advice=_TEXT_ONLY)
    return VisionSpec(
        names=_SIGLIP,
        hidden=fields.integer("hidden_size"),
        intermediate=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=fields.integer("num_attention_heads"),
        out=hidden,
        taps=(),
        frames=0,
        positions=grid**2,
        approximate=_gelu(fields),
        rope_theta=None,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        whole_layers=tuple(range(fields.integer("num_hidden_layers"))),
        merger="mean",
        entry=entry,
    )


_Reader = Callable[[Checkpoint, Fields, int], VisionSpec]
TOWERS: Mapping[str, _Reader] = {
    **{f"Qwen3{kind}ForConditionalGeneration": _qwen3_vl for kind in ("VL", "VLMoe", "_5", "_5Moe")},
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Gemma3ForConditionalGeneration": _gemma3,
}
# Prefixes of a tower's tensors, current and old, and parts that no image token needs.
_PREFIX = re.compile(r"(?:model\.)?(?:visual\.|vision_tower\.(?:vision_model\.)?|(?=multi_modal_projector\.))")
_UNUSED_PART = re.compile(r"head\.")


def tower_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors of the tower by their names in it."""
    names = {name: _PREFIX.sub("", name, count=1) for name in checkpoint.tensors if _PREFIX.match(name)}
    return {
        own: replace(checkpoint.tensors[name], name=own) for name, own in names.items() if not _UNUSED_PART.match(own)
    }


def _patch_values(fields: Fields) -> int:
    """A layer holds its input and a norm, and queries, keys, values and their mix, or its MLP twice."""
    hidden = fields.integer("hidden_size")
    return 2 * hidden + max(4 * hidden, 2 * fields.integer("intermediate_size"))


def _gelu(fields: Fields) -> Literal["none", "tanh"]:
    fields.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    return "none" if fields.get("hidden_act", "gelu_pytorch_tanh") == "gelu" else "tanh"


def _token(config: Mapping[str, Any], *names: str) -> int:
    """Return the token id in the first of the fields ``names`` that ``config`` has."""
    name = next((name for name in names if name in config), names[0])
    token = config.get(name)
    if type(token) is not int or token < 0:
        raise BadCheckpoint(f"config.json: {name} should be a token id, it is {quoted(token)}")
    return token


def _resample(fields: Fields, default: int) -> Literal["bicubic", "bilinear"]:
    fields.only("resample", *_RESAMPLE)
    return _RESAMPLE[fields.get("resample", default)]


def _bound(fields: Fields, name: str, edge: str) -> int:
    """Return a number of pixels, which newer files have as an ``edge`` of size."""
    size, value = fields.get("size", {}), fields.get(name)
    value = size.get(edge) if value is None and isinstance(size, Mapping) else value
    if type(value) is not int or value < 1:
        raise BadCheckpoint(
            f"{fields.where}: {name}, or {edge} of size, should be a number of pixels, it is {quoted(value)}"
        )
    return value


def _colour(fields: Fields, name: str) -> tuple[float, float, float]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != 3 or not all(type(value) in (int, float) for value in values):
        raise BadCheckpoint(f"{fields.where}: {name} should be three numbers, it is {quoted(values)}")
    red, green, blue = map(float, values)
    return red, green, blue


def _preprocessor(folder: Path, kind: str) -> Fields:
    """Return preprocessor_config.json, or the part about images of processor_config.json (transformers 5), unfinished.

    Raises BadCheckpoint for an image processor that is not of this ``kind``, or has steps that are not implemented.
    """
    name, settings = _settings(folder)
    fields = Fields(dict(settings), name)
    fields.skip(*_UNUSED)
    fields.only("image_processor_type", *(f"{kind}ImageProcessor{way}" for way in ("", "Fast", "Pil")))
    for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.only(flag, True)
    for flag in ("do_center_crop", "do_pad"):
        fields.only(flag, False)
    fields.skip("crop_size", "pad_size")  # of steps that are off
    if abs(fields.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise BadCheckpoint(f"{name}: rescale_factor should be 1/255, it is {quoted(settings['rescale_factor'])}")
    return fields


def _settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{folder / name} should be JSON: {clipped(error)}") from error
        settings = settings.get(key) if key and isinstance(settings, dict) else settings
        if isinstance(settings, dict):
            return name, settings
    raise BadCheckpoint(
        f"{folder}: preprocessor_config.json should say how images become patches, it is missing; add it, or "
        f"{_TEXT_ONLY}"
    )
