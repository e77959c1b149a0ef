"""Cut an image into tiles, as the published preprocessing of Idefics 3 and LFM2-VL does."""

import math
from typing import TYPE_CHECKING

from tandemrt.engines.contract.vision import Tiles, VisionEntry

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

_LARGE = 2  # times the most pixels: images up to it are not cut


def cut(
    image: "Image", entry: VisionEntry, tiles: Tiles, size: tuple[int, int], how: "Resampling"
) -> "tuple[tuple[int, int], list[Image]]":
    """Return the rows and columns of tiles, or zeros, the tiles row by row, and all of ``image`` in ``size``."""
    side = tiles.side
    if tiles.longest:
        image = image.resize(_with_long_side(*image.size, tiles.longest), how)
        columns, rows = _covering(*image.size, side)
        image = tiled = image.resize((columns * side, rows * side), how)
    else:
        squares = math.prod(round(length / entry.factor) for length in image.size)
        large = squares * entry.factor**2 > _LARGE * entry.max_pixels
        columns, rows = _nearest(*image.size, tiles) if large else (1, 1)
        tiled = image.resize((columns * side, rows * side), how)
    if columns * rows == 1:
        return (0, 0), [image.resize(size, how)]
    places = [(side * column, side * row) for row in range(rows) for column in range(columns)]
    cuts = [tiled.crop((left, top, left + side, top + side)) for left, top in places]
    return (rows, columns), cuts if tiles.before_all is None else [*cuts, image.resize(size, how)]


def _with_long_side(width: int, height: int, long: int) -> tuple[int, int]:
    short = _short_side(width, height, long)
    return _turned(long, max(1, short + short % 2), width, height)


def _covering(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the columns and rows of tiles that an image needs."""
    long = math.ceil(max(width, height) / side)
    return _turned(long, math.ceil(_short_side(width, height, long * side) / side), width, height)


def _short_side(width: int, height: int, long: int) -> int:
    """Return the short side of an image with the shape of ``width`` x ``height`` whose long side is ``long``."""
    shape = width / height
    return int(long / shape if width >= height else long * shape)


def _turned(long: int, short: int, width: int, height: int) -> tuple[int, int]:
    return (long, short) if width >= height else (short, long)


def _nearest(width: int, height: int, tiles: Tiles) -> tuple[int, int]:
    """Return the columns and rows whose shape is nearest: of equal ones, the most that an image fills by half."""
    counts = range(1, tiles.most + 1)
    grids = [(columns, rows) for columns in counts for rows in counts if tiles.least <= columns * rows <= tiles.most]

    def distance(grid: tuple[int, int]) -> float:
        return abs(width / height - grid[0] / grid[1])

    equal = [grid for grid in grids if distance(grid) == min(map(distance, grids))]
    filled = [grid for grid in equal if 2 * width * height > tiles.side**2 * math.prod(grid)]
    return max(filled, key=math.prod, default=min(equal, key=math.prod))
