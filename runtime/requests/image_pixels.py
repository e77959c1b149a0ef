"""Decode an image and cut it into patches for a vision tower. Runs in a worker process for images of unknown origin."""

import binascii
import math
from base64 import b64decode
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import BadRequest, clipped
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.requests.image_tiles import cut
from tandemrt.runtime.workers.sandbox.frames import WithBytes

if TYPE_CHECKING:
    from PIL.Image import Image

Cut = tuple[tuple[int, int], npt.NDArray[np.uint8]]  # rows and columns of patches, and these
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_STRETCHED = 200  # long side by short side, as the published preprocessing has it


def resized(width: int, height: int, entry: VisionEntry) -> tuple[int, int]:
    """Return the size to which an image of ``width`` x ``height`` is resized, as the published preprocessing does.

    Raises BadRequest for an image that is too stretched.
    """
    long, short = max(width, height), min(width, height)
    if long > _MOST_STRETCHED * short:
        raise BadRequest(
            f"image: the long side must be at most {_MOST_STRETCHED} times the short one, received {width} x {height} "
            "pixels; cut it"
        )
    factor, most = entry.factor, entry.max_pixels
    if entry.resize == "square":
        return entry.side, entry.side
    if entry.resize == "edge":
        shrink = max(1.0, long / entry.side)
        squares = [math.ceil(max(1, math.floor(side / shrink)) / factor) for side in (width, height)]
    elif entry.resize == "fill":
        grow = math.sqrt(most / (width * height))
        squares = [math.floor(grow * side / factor) for side in (width, height)]
        if 0 in squares:
            squares = [min(long // short, most // factor**2) if count else 1 for count in squares]
    else:
        least = int(entry.tiles is not None)  # of LFM2-VL; Qwen's sizes may be zero here, and grow below
        squares = [max(least, round(side / factor)) for side in (width, height)]
        if math.prod(squares) * factor**2 > most:
            shrink = math.sqrt(width * height / most)
            squares = [max(1, math.floor(side / shrink / factor)) for side in (width, height)]
        elif math.prod(squares) * factor**2 < entry.min_pixels:
            grow = math.sqrt(entry.min_pixels / (width * height))
            squares = [math.ceil(side * grow / factor) for side in (width, height)]
    return squares[0] * factor, squares[1] * factor


def patches_in_worker(data: bytes | str, most: int, entry: VisionEntry) -> WithBytes:
    """Decode ``data``, an image of at most ``most`` pixels or its base64, into patches of its ``parts``, as bytes.

    The result has the rows and columns of tiles, and those of the patches of each part. Raises BadRequest for what is
    no single image in one of FORMATS.
    """
    try:
        file = b64decode(data, validate=True) if isinstance(data, str) else data
    except (binascii.Error, ValueError) as error:
        rule = "image: a data URL must hold base64 without line breaks"
        raise BadRequest(f"{rule}: {clipped(error)}; encode it again") from None
    grid, cuts = patches_of(upright(_opened(file, most)), entry)
    return WithBytes((grid, [shape for shape, _ in cuts]), b"".join(patches.data for _, patches in cuts))


def patches_of(image: "Image", entry: VisionEntry) -> tuple[tuple[int, int], list[Cut]]:
    """Return the rows and columns of the tiles of an upright ``image``, and in_patches of each of its ``parts``."""
    grid, images = parts(image, entry)
    return grid, [in_patches(np.asarray(part), entry) for part in images]


def in_patches(colours: npt.NDArray[np.uint8], entry: VisionEntry) -> Cut:
    """Cut ``colours`` [height, width, 3] into patches, without pixels that complete no square at an edge.

    Returns the rows and columns of patches, and these, square by square: [patches, colours].
    """
    merge, side = entry.merge_size, entry.patch_size
    rows, columns = (length // entry.factor for length in colours.shape[:2])
    whole = colours[: rows * entry.factor, : columns * entry.factor]
    squares = whole.reshape(rows, merge, side, columns, merge, side, 3)
    ordered = squares.transpose(0, 3, 1, 4, 6, 2, 5)  # square, patch in it, colour, pixel
    patches = np.ascontiguousarray(ordered).reshape(-1, 3 * side * side)
    return (rows * merge, columns * merge), patches


def parts(image: "Image", entry: VisionEntry) -> "tuple[tuple[int, int], list[Image]]":
    """Return the rows and columns of the tiles of an upright ``image``, these, and all of it, resized."""
    from PIL.Image import Resampling

    size, how = resized(*image.size, entry), Resampling[entry.resample.upper()]
    if entry.tiles is None:
        return (0, 0), [image.resize(size, how)]
    return cut(image, entry, entry.tiles, size, how)


def upright(image: "Image") -> "Image":
    """Return ``image`` decoded, upright, and in RGB on white. Raises BadRequest if it cannot be decoded."""
    from PIL import ImageOps
    from PIL.Image import alpha_composite, fromarray, new

    if image.mode in ("F", "I"):
        raise BadRequest(
            f"image: must have 8 or 16 bits per colour, received mode {image.mode!r}; convert it, white is 255"
        )
    try:
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I;16"):  # Pillow would clip it, so that most greys become white
            turned = fromarray((np.asarray(turned) >> 8).astype(np.uint8))
        if turned.has_transparency_data:
            turned = turned.convert("RGBA")
            turned = alpha_composite(new("RGBA", turned.size, "white"), turned)
        return turned.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # decoders raise any exception for damaged data
        raise BadRequest(f"image: could not be decoded, it may be cut off: {clipped(error)}; send it again") from None


def require_pillow() -> None:
    """Raise BadRequest unless Pillow is installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise BadRequest(
            f"image: needs Pillow, which is not installed on this machine: {pip_install('images')}"
        ) from None


def load_decoders() -> None:
    """Import what decodes FORMATS, so that the first image of a worker process is as quick as others."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401


def _opened(data: bytes, most: int) -> Any:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # a warning; the limit below is an error
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
        frames = getattr(image, "is_animated", False)
    except MemoryError:
        raise
    except Exception:
        raise BadRequest(
            f"image: must be a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file; the {len(data)} bytes received are "
            "none of these; convert it"
        ) from None
    if image.width * image.height > most:
        raise BadRequest(
            f"image: at most {most} pixels (max_image_pixels), received {image.width} x {image.height}; resize it"
        )
    if frames:
        raise BadRequest("image: must be a single image, received an animation; send one of its frames")
    return image
