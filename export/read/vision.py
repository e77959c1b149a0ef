"""Read the vision tower of a checkpoint: its sizes, its tensors and how it wants images. What is lacking is named."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.unused_fields import is_unused

TOWERS = tuple(f"Qwen3{kind}ForConditionalGeneration" for kind in ("VL", "VLMoe", "_5", "_5Moe"))
_PREFIXES = ("model.visual.", "visual.")  # of tensors, since transformers 4.52 and before
_PROCESSORS = tuple(f"Qwen2VLImageProcessor{kind}" for kind in ("", "Fast", "Pil"))
_TEXT_ONLY = "leave target.images out, and the bundle reads text only"
_BICUBIC = 3  # as Pillow counts
# Fields of image processors that change nothing for one still image.
_UNUSED = frozenset((
    "processor_class", "data_format", "input_data_format", "device", "return_tensors", "disable_grouping",
    "default_to_square", "image_seq_length",
))  # fmt: skip


@dataclass(frozen=True)
class VisionSpec:
    """Sizes of a tower: a transformer over patches, and a merger of neighbouring patches into tokens of the decoder.

    ``taps``: layers whose streams have mergers of their own (DeepStack). ``frames``: of a patch; those of a still image
    are equal. ``positions``: rows of the table of learned positions.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    out: int
    taps: tuple[int, ...]
    frames: int
    positions: int
    approximate: Literal["none", "tanh"]
    rope_theta: float
    entry: VisionEntry

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
        config, where = checkpoint.config, "config.json: vision_config"
        tower = config.get("vision_config")
        if not isinstance(tower, Mapping):
            raise BadCheckpoint(f"{where} should be an object, it is {quoted(tower)}")
        fields = Fields(dict(tower), where)
        fields.skip("model_type", *filter(is_unused, fields.data))
        fields.only("in_channels", 3)
        rope = fields.get("rope_parameters", None) or {}
        if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") != "axial":
            raise BadCheckpoint(f"{where}.rope_parameters should be of type axial, it is {quoted(rope)}")
        taps = fields.get("deepstack_visual_indexes", ())
        positions = fields.integer("num_position_embeddings")
        patch, merge = fields.integer("patch_size"), fields.integer("spatial_merge_size")
        spec = cls(
            hidden=fields.integer("hidden_size"),
            intermediate=fields.integer("intermediate_size"),
            layers=fields.integer("depth"),
            heads=fields.integer("num_heads"),
            out=fields.integer("out_hidden_size"),
            taps=tuple(taps) if isinstance(taps, list | tuple) else (-1,),
            frames=fields.integer("temporal_patch_size"),
            positions=positions,
            approximate=_gelu(fields),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            entry=_entry(checkpoint.folder, _image_token(config), patch, merge, positions, fields),
        )
        fields.finish(advice=_TEXT_ONLY)
        spec._check(where, hidden)
        return spec

    def _check(self, where: str, hidden: int) -> None:
        if self.hidden % (4 * self.heads):
            raise BadCheckpoint(
                f"{where}.hidden_size should be a multiple of 4 values for each of num_heads, it is {self.hidden} for "
                f"{self.heads}"
            )
        if self.out != hidden:
            raise BadCheckpoint(f"{where}.out_hidden_size should be that of the text part, {hidden}, it is {self.out}")
        if isqrt(self.positions) ** 2 != self.positions:
            raise BadCheckpoint(f"{where}.num_position_embeddings should be a square, it is {self.positions}")
        known = all(isinstance(tap, int) and 0 <= tap < self.layers for tap in self.taps)
        if not known or list(self.taps) != sorted(set(self.taps)):
            raise BadCheckpoint(
                f"{where}.deepstack_visual_indexes should be layers below {self.layers}, ascending, it is "
                f"{quoted(list(self.taps))}"
            )


def tower_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors of the tower by their names in it."""
    return {
        name.removeprefix(prefix): replace(tensor, name=name.removeprefix(prefix))
        for prefix in _PREFIXES
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }


def _gelu(fields: Fields) -> Literal["none", "tanh"]:
    fields.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    return "none" if fields.get("hidden_act", "gelu_pytorch_tanh") == "gelu" else "tanh"


def _image_token(config: Mapping[str, Any]) -> int:
    token = config.get("image_token_id")
    if type(token) is not int or token < 0:
        raise BadCheckpoint(f"config.json: image_token_id should be a token id, it is {quoted(token)}")
    return token


def _entry(folder: Path, token: int, patch: int, merge: int, positions: int, tower: Fields) -> VisionEntry:
    """Read preprocessor_config.json, or the part about images of processor_config.json (transformers 5)."""
    name, settings = _preprocessor(folder)
    fields = Fields(dict(settings), name)
    fields.skip(*_UNUSED)
    fields.only("image_processor_type", *_PROCESSORS)
    for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.only(flag, True)
    for flag in ("do_center_crop", "do_pad"):
        fields.only(flag, False)
    fields.skip("crop_size", "pad_size")  # of steps that are off
    fields.only("resample", _BICUBIC)
    if abs(fields.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise BadCheckpoint(f"{name}: rescale_factor should be 1/255, it is {quoted(settings['rescale_factor'])}")
    for own, wanted in (
        ("patch_size", patch),
        ("merge_size", merge),
        ("temporal_patch_size", tower.integer("temporal_patch_size")),
    ):
        if fields.get(own, wanted) != wanted:
            raise BadCheckpoint(f"{name}: {own} should be the tower's, {wanted}, it is {quoted(settings[own])}")
    entry = VisionEntry(
        image_token=token,
        patch_size=patch,
        merge_size=merge,
        grid_side=isqrt(positions),
        min_pixels=_bound(fields, "min_pixels", "shortest_edge"),
        max_pixels=_bound(fields, "max_pixels", "longest_edge"),
        mean=_colour(fields, "image_mean"),
        std=_colour(fields, "image_std"),
    )
    fields.finish(advice=_TEXT_ONLY)
    return entry


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


def _preprocessor(folder: Path) -> tuple[str, Mapping[str, Any]]:
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
