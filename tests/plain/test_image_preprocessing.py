"""Images become the numbers that transformers' image processor makes of them."""

import random
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tandemrt.engines.contract.vision import Tiles, VisionEntry
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.images import Image, ImageReader, ImageSource
from tests.pictures import normalized

ENTRY = VisionEntry(
    image_token=1,
    position_rows=3,
    patch_values=1,
    patch_size=16,
    merge_size=2,
    grid_side=48,
    resize="bounds",
    min_pixels=32 * 32 * 4,
    max_pixels=1 << 18,
    resample="bicubic",
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
PROCESSOR = Qwen2VLImageProcessorPil(
    size={"shortest_edge": ENTRY.min_pixels, "longest_edge": ENTRY.max_pixels},
    patch_size=ENTRY.patch_size,
    merge_size=ENTRY.merge_size,
    temporal_patch_size=2,
    image_mean=list(ENTRY.mean),
    image_std=list(ENTRY.std),
)
SQUARE = ENTRY.model_copy(
    update={"resize": "square", "min_pixels": 224**2, "max_pixels": 224**2, "resample": "bilinear", "merge_size": 1}
)
SQUARE_PROCESSOR = Gemma3ImageProcessorPil(
    size={"height": SQUARE.side, "width": SQUARE.side}, image_mean=list(ENTRY.mean), image_std=list(ENTRY.std)
)
FILLED = ENTRY.model_copy(
    update={
        "resize": "fill",
        "merge_size": 3,
        "min_pixels": 1,
        "max_pixels": 70 * 48**2,
        "mean": (0,) * 3,
        "std": (1,) * 3,
    }
)
FILLED_PROCESSOR = Gemma4ImageProcessorPil(max_soft_tokens=70)
EDGED = ENTRY.model_copy(update={"resize": "edge", "min_pixels": 1, "max_pixels": 256**2})
EDGED_PROCESSOR = PixtralImageProcessorPil(
    size={"longest_edge": 256},
    patch_size={"height": 32, "width": 32},
    image_mean=list(ENTRY.mean),
    image_std=list(ENTRY.std),
)
TILED = ENTRY.model_copy(  # 64 pixels of each side are seen: the rest completes no square
    update={
        "resize": "square",
        "min_pixels": 66**2,
        "max_pixels": 66**2,
        "resample": "lanczos",
        "tiles": Tiles(side=66, longest=240, before_tile="image", before_all="image", before_uncut="image"),
    }
)
TILED_PROCESSOR = Idefics3ImageProcessorPil(
    size={"longest_edge": 240},
    max_image_size={"longest_edge": 66},
    image_mean=list(ENTRY.mean),
    image_std=list(ENTRY.std),
)
BY_SHAPE = ENTRY.model_copy(
    update={
        "resize": "bounds",
        "min_pixels": 256**2,
        "max_pixels": 512**2,
        "resample": "bilinear",
        "tiles": Tiles(side=512, least=2, most=10, before_tile="image", before_all="image", before_uncut="image"),
    }
)
# By width and height: rows and columns of tiles, and patches along the sides of the image as a whole, as transformers
# 5.23 has them with torchvision 0.28, without which its image processor of LFM2-VL cannot run.
SHAPES = {
    (1, 1): ((1, 1), (16, 16)),
    (300, 200): ((1, 1), (14, 20)),
    (511, 513): ((1, 1), (32, 32)),
    (700, 700): ((1, 1), (32, 32)),
    (740, 740): ((2, 2), (32, 32)),
    (1600, 1200): ((2, 3), (26, 36)),
    (1200, 1600): ((3, 2), (36, 26)),
    (3000, 900): ((1, 3), (16, 58)),
    (2000, 10): ((1, 1), (2, 228)),
    (1080, 1080): ((2, 2), (32, 32)),
    (1090, 1090): ((3, 3), (32, 32)),
    (1100, 600): ((1, 2), (22, 42)),
    (2048, 2048): ((3, 3), (32, 32)),
}
FORMAT_BY_MODE = {
    "RGB": "PNG",
    "L": "PNG",
    "1": "PNG",
    "P": "GIF",
    "CMYK": "JPEG",
    "YCbCr": "JPEG",
    "I;16": "PNG",
    "RGBA": "PNG",
    "LA": "PNG",
    "PA": "PNG",
    "RGBX": "WEBP",
}
SIZES = ((1, 1), (1, 150), (199, 1), (31, 33), (2, 300), (4000, 3000))  # of the first images


@cache
def image_file(seed: int) -> bytes:
    draw = random.Random(seed)
    size = SIZES[seed] if seed < len(SIZES) else (draw.randint(1, 400), draw.randint(20, 400))
    mode = list(FORMAT_BY_MODE)[seed % len(FORMAT_BY_MODE)]
    colours = np.random.default_rng(seed).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Pillow.fromarray(colours).resize(size)
    if mode == "I;16":
        image = Pillow.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    elif mode == "PA":
        image = image.convert("RGB").quantize(16)
        image.info["transparency"] = 3
    else:
        image = image.convert(mode)
    exif = Pillow.Exif()
    exif[0x0112] = seed % 9  # orientation; 0 is no valid one
    file = BytesIO()
    image.save(file, FORMAT_BY_MODE[mode], exif=exif)
    return file.getvalue()


def reader(entry: VisionEntry) -> ImageReader:
    tokenizer = Tokenizer(WordLevel({"": 0, "image": 1}, unk_token=""))
    return ImageReader(entry, RuntimeOptions(), tokenizer)


def read(data: bytes, entry: VisionEntry) -> list[Image]:
    return reader(entry).read(ImageSource(data), lambda _, function, *arguments: function(*arguments))


def pixels_of(data: bytes, entry: VisionEntry) -> np.ndarray:
    return np.concatenate([normalized(image) for image in read(data, entry)])


def test_padded_images_have_few_sizes() -> None:
    entry = ENTRY.model_copy(update={"padded": True})
    sizes = {tokens: entry.padded_tokens(tokens) for tokens in range(1, 16385)}
    assert all(tokens <= padded <= tokens + max(31, tokens // 8) for tokens, padded in sizes.items())
    assert len(set(sizes.values())) < 70
    assert all(ENTRY.padded_tokens(tokens) == tokens for tokens in sizes)


@pytest.mark.parametrize(("padded", "tokens"), [(False, 545), (True, 576)])
def test_the_memory_of_a_tower_includes_the_padding(tokens: int, *, padded: bool) -> None:
    entry = ENTRY.model_copy(update={"padded": padded, "max_pixels": 545 * 32 * 32, "patch_values": 7})
    assert entry.working_bytes(4096) == tokens * 2 * 2 * 7 * 4


def test_bytes_that_are_base64_text_do_not_get_the_image_of_that_text() -> None:
    images, text = reader(ENTRY), b64encode(image_file(0))

    def run(_: str, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    url = ImageSource(f"data:image/png;base64,{text.decode()}")
    assert images.read(url, run) is images.read(url, run)
    ours, theirs = (images.read(url, run, salt) for salt in ("ours", "theirs"))
    assert ours is images.read(url, run, "ours")
    assert ours is not theirs
    assert ours is not images.read(url, run)
    with pytest.raises(BadRequest, match="must be a PNG"):
        images.read(ImageSource(text), run)


def test_a_data_url_with_a_lone_surrogate_is_rejected() -> None:
    source = ImageSource("data:image/png;base64,\ud800")
    with pytest.raises(BadRequest, match="a data URL must hold base64 without line breaks"):
        reader(ENTRY).read(source, lambda _, function, *arguments: function(*arguments))


def test_a_path_without_a_hash_has_a_key(tmp_path: Path) -> None:
    @dataclass
    class Named:
        path: Path

        def __fspath__(self) -> str:
            return str(self.path)

    ours, theirs = (ImageSource(Named(tmp_path)) for _ in range(2))
    assert len({ours.key, theirs.key, ours.key}) == 2
    assert ImageSource(tmp_path).key == ImageSource(Path(str(tmp_path))).key


def test_a_file_is_decoded_once_for_each_detail() -> None:
    reads, decoded = reader(ENTRY), []

    def in_worker(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        decoded.append(what)
        return function(*arguments)

    files = [image_file(3), image_file(5)]
    images = [reads.read(ImageSource(data, low=low), in_worker) for data in files for low in (False, True, False)]
    assert len(decoded) == 4
    assert images[0] is images[2]
    assert [image.digest for image in images[0]] == [image.digest for image in read(files[0], ENTRY)]
    assert images[0][0].digest != images[3][0].digest


def as_transformers_reads(data: bytes) -> Pillow.Image:
    """Where it differs from transformers on purpose, the image is changed before."""
    image = Pillow.open(BytesIO(data))
    if image.mode == "I;16":  # transformers clips 16 bits to 8, so that most greys become white
        image = ImageOps.exif_transpose(image)
        image = Pillow.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.has_transparency_data:  # transformers shows the colours of transparent pixels
        image = ImageOps.exif_transpose(image).convert("RGBA")
        image = Pillow.alpha_composite(Pillow.new("RGBA", image.size, "white"), image)
    return load_image(image)


@pytest.mark.parametrize("seed", range(50))
def test_pixels_equal_those_of_transformers(seed: int) -> None:
    data = image_file(seed)
    expected = PROCESSOR(images=[as_transformers_reads(data)], return_tensors="np")["pixel_values"]
    first, second = np.moveaxis(expected.reshape(len(expected), 3, 2, -1), 2, 0)
    assert np.array_equal(first, second)  # the two frames of a still image
    pixels = pixels_of(data, ENTRY)
    assert pixels.shape == (len(expected), 3 * ENTRY.patch_size**2)
    np.testing.assert_allclose(pixels, first.reshape(pixels.shape), atol=1e-6)  # a step of a colour is 0.014


@pytest.mark.parametrize("seeds", [range(25), range(25, 50)])
def test_pixels_of_a_square_equal_those_of_transformers(seeds: range) -> None:
    for seed in seeds:
        data = image_file(seed)
        (expected,) = SQUARE_PROCESSOR(images=[as_transformers_reads(data)], return_tensors="np")["pixel_values"]
        np.testing.assert_allclose(pixels_of(data, SQUARE), in_patches(expected, SQUARE), atol=1e-6)


def in_patches(colours: np.ndarray, entry: VisionEntry) -> np.ndarray:
    """Cut ``colours`` [3, height, width] into patches, square by square."""
    side, merge = entry.patch_size, entry.merge_size
    rows, columns = (length // entry.factor for length in colours.shape[1:])
    squares = colours.reshape(3, rows, merge, side, columns, merge, side)
    return squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * side**2)


@pytest.mark.parametrize("seeds", [range(25), range(25, 50)])
def test_pixels_of_a_filled_size_equal_those_of_transformers(seeds: range) -> None:
    side = FILLED.patch_size
    for seed in seeds:
        data = image_file(seed)
        read = FILLED_PROCESSOR(images=[as_transformers_reads(data)], return_tensors="np")
        patches, places = read["pixel_values"][0], read["image_position_ids"][0]
        columns, rows = places.max(axis=0) + 1
        grid = patches[: rows * columns].reshape(rows, columns, side, side, 3)  # a pixel's colours are neighbours
        colours = grid.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)
        np.testing.assert_allclose(pixels_of(data, FILLED), in_patches(colours, FILLED), atol=1e-6)


@pytest.mark.parametrize("seeds", [range(25), range(25, 50)])
def test_pixels_up_to_an_edge_equal_those_of_transformers(seeds: range) -> None:
    for seed in seeds:
        data = image_file(seed)
        (colours,) = EDGED_PROCESSOR(images=[as_transformers_reads(data)], return_tensors="np")["pixel_values"]
        np.testing.assert_allclose(pixels_of(data, EDGED), in_patches(colours, EDGED), atol=1e-6)


@pytest.mark.parametrize("seeds", [range(25), range(25, 50)])
def test_pixels_of_tiles_equal_those_of_transformers(seeds: range) -> None:
    for seed in seeds:
        data = image_file(seed)
        (parts,) = TILED_PROCESSOR(images=[[as_transformers_reads(data)]], return_tensors="np")["pixel_values"]
        seen = 64  # of 66 pixels
        expected = np.concatenate([in_patches(colours[:, :seen, :seen], TILED) for colours in parts])
        np.testing.assert_allclose(pixels_of(data, TILED), expected, atol=1e-6)


@pytest.mark.parametrize("size", SHAPES)
def test_tiles_by_shape_are_those_of_transformers(size: tuple[int, int]) -> None:
    (rows, columns), whole = SHAPES[size]
    image = Pillow.new("RGB", size)
    *tiles, last = reader(BY_SHAPE).read(ImageSource(image), lambda *_: None)
    assert (last.rows, last.columns) == whole
    assert [(tile.rows, tile.columns) for tile in tiles] == [(32, 32)] * (rows * columns if rows * columns > 1 else 0)


@pytest.mark.parametrize("entry", [TILED, BY_SHAPE])
def test_an_image_of_low_detail_is_not_cut(entry: VisionEntry) -> None:
    image = Pillow.new("RGB", (1600, 1200))
    parts, whole = (reader(entry).read(ImageSource(image, low=low), lambda *_: None) for low in (False, True))
    assert len(parts) > len(whole) == 1


def test_tiles_by_shape_have_the_pixels_of_an_antialiased_resize() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (100, 140, 3), dtype=np.uint8)
    image = Pillow.fromarray(colours).resize((1400, 1000))
    parts = reader(BY_SHAPE).read(ImageSource(image), lambda *_: None)
    source = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]

    def resized(height: int, width: int) -> np.ndarray:
        size = (height, width)
        return torch.nn.functional.interpolate(source, size, mode="bilinear", antialias=True)[0].numpy()

    cut = resized(1024, 1536)
    tiles = [cut[:, 512 * row :][:, :512, 512 * column :][..., :512] for row in range(2) for column in range(3)]
    expected = [*tiles, resized(parts[-1].rows * 16, parts[-1].columns * 16)]
    assert len(parts) == len(expected)
    for part, wanted in zip(parts, expected, strict=True):
        apart = np.abs(part.patches.astype(int) - in_patches(wanted, BY_SHAPE))
        assert apart.max() <= 2
        assert np.mean(apart > 0) < 0.01


@pytest.mark.parametrize("mode", ["F", "I"])
def test_an_image_whose_white_is_unknown_is_refused(mode: str) -> None:
    with pytest.raises(BadRequest, match=f"must have 8 or 16 bits per colour, received mode '{mode}'"):
        reader(ENTRY).read(ImageSource(Pillow.new(mode, (40, 40))), lambda *_: None)
