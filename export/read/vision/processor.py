"""Read how a checkpoint wants its images: preprocessor_config.json, or what transformers 5 writes in its place."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.vision import Filter
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.fields import Fields, is_number

TEXT_ONLY = "leave target.images out, and the bundle reads text only"
_RESAMPLE: Mapping[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow counts
# Fields of image processors that change nothing for one still image.
_UNUSED = frozenset((
    "processor_class", "data_format", "input_data_format", "device", "return_tensors", "disable_grouping",
    "default_to_square", "image_seq_length",
))  # fmt: skip


def image_processor(folder: Path, *kinds: str, without: Collection[str] = ()) -> Fields:
    """Return preprocessor_config.json, or the part about images of processor_config.json (transformers 5), unfinished.

    ``without``: steps that are off, or change nothing for one image. Raises BadCheckpoint for an image processor that
    is of none of these ``kinds``, or has steps that are not implemented.
    """
    name, settings = _settings(folder)
    fields = Fields(dict(settings), name)
    fields.skip(*_UNUSED, *without)
    ways = ("", "Fast", "Pil")
    fields.only("image_processor_type", *(f"{kind}ImageProcessor{way}" for kind in kinds for way in ways))
    for flag in {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb"}.difference(without):
        fields.only(flag, True)
    for flag in {"do_center_crop", "do_pad"}.difference(without):
        fields.only(flag, False)
    fields.skip("crop_size", "pad_size")  # of steps that are off
    rescale = fields.number("rescale_factor", 1 / 255)
    fields.require("rescale_factor", abs(rescale * 255 - 1) < 1e-6, "1/255")
    return fields


def resample(fields: Fields, default: int) -> Filter:
    """Return the filter that resizes."""
    fields.only("resample", *_RESAMPLE)
    return _RESAMPLE[fields.get("resample", default)]


def colour(fields: Fields, name: str) -> tuple[float, float, float]:
    """Return a mean or standard deviation of colours."""
    values = fields.get(name)
    known = isinstance(values, list) and len(values) == 3 and all(map(is_number, values))
    fields.require(name, known, "three numbers")
    red, green, blue = map(float, values)
    return red, green, blue


def edge(fields: Fields, kind: str, name: str = "", *, of: str = "size") -> int:
    """Return a number of pixels: the edge ``kind`` in the field ``of``, or what older files call ``name``."""
    if name and fields.get(name) is not None:
        return fields.integer(name)
    edges = fields.get(of)
    value = edges.get(kind) if isinstance(edges, Mapping) else None
    number = value if type(value) is int else 0
    fields.require(of, number > 0, f"an object whose {kind} is a number of pixels")
    return number


def require_same(fields: Fields, wanted: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint unless what the image processor says of the tower is what the tower says."""
    for name, value in wanted.items():
        fields.require(name, fields.get(name, value) == value, f"the tower's, {quoted(value)}")


def json_of(file: Path) -> dict[str, Any] | None:
    """Return the object in ``file``; None if there is no such file. Raises BadCheckpoint for what is no JSON."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file} should be JSON: {clipped(error)}") from error
    return settings if isinstance(settings, dict) else {}


def _settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        settings = json_of(folder / name)
        settings = settings.get(key) if settings and key else settings
        if isinstance(settings, dict):
            return name, settings
    raise BadCheckpoint(
        f"{folder}: preprocessor_config.json should say how images become patches, it is missing; add it, or "
        f"{TEXT_ONLY}"
    )
