"""What a vision tower reads: how an image becomes patches, and which tokens stand for an image."""

from math import isqrt
from typing import Annotated, Literal

from pydantic import Field

from tandemrt.engines.validation.records import Record

Size = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
Colour = tuple[float, float, float]  # red, green and blue
# How an image is resized to sides that are multiples of a factor. "bounds": to the nearest ones, or within the bounds;
# "square": to a square of the most pixels, whatever its shape; "fill": grown or shrunk to the most pixels; "edge": to
# the next larger ones, with a long side of at most that of such a square.
Resize = Literal["bounds", "square", "fill", "edge"]
Filter = Literal["lanczos", "bilinear", "bicubic"]


class Tiles(Record):
    """How a large image is cut into squares; the tower sees each of them, row by row, and then all of the image.

    Attributes:
        side: pixels along a side of a tile.
        longest: pixels of the long side before each side grows to a multiple of ``side`` (Idefics 3); 0: images of more
            than twice the most pixels get the number of tiles, ``least`` to ``most``, that fits their shape (LFM2-VL).
        before_tile: text before a tile; it has the fields ``row`` and ``column``, from 1.
        after_row: text after a row of tiles.
        before_all: text before all of an image that was cut; None: the tower sees its tiles alone.
        before_uncut: text before an image that was not.
    """

    side: Size
    longest: Annotated[int, Field(ge=0)] = 0
    least: Size = 1
    most: Size = 1
    before_tile: str
    after_row: str = ""
    before_all: str | None = None
    before_uncut: str = ""

    @property
    def uncut(self) -> "Tiles":
        """The same for images that are not cut, whatever their size."""
        return self.model_copy(update={"longest": self.longest and self.side, "most": 1, "least": 1})

    def texts(self, rows: int, columns: int) -> list[str]:
        """Return the text before each image that the tower sees; no ``rows``: the image was not cut."""
        if not rows:
            return [self.before_uncut]
        places = [(row, column) for row in range(rows) for column in range(columns)]
        texts = [
            (self.after_row if row and not column else "") + self.before_tile.format(row=row + 1, column=column + 1)
            for row, column in places
        ]
        return texts if self.before_all is None else [*texts, self.after_row + self.before_all]


class VisionEntry(Record):
    """The images of a bundle. Sides of an image become multiples of ``patch_size`` * ``merge_size`` pixels.

    Attributes:
        image_token: the token of a prompt that stands for an image; the runtime repeats it.
        image_break: the token between two rows of an image; None: there is none.
        template_text, prompt_text: what the chat template writes for an image, and what takes its place, which has
            ``image_token`` once.
        position_rows: 3: a token of an image has positions in time, height and width; 0: it has one, as text has.
        both_ways: the tokens of an image attend to each other, also to later ones.
        patch_values: numbers per patch that the tower has in memory at once, about.
        padded: patches that no patch attends to follow those of an image, so that images have few sizes (a GPU prepares
            kernels for each).
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of the square that becomes one token.
        grid_side: learned positions along a side; those of a patch are interpolated. 0: there are none.
        grid_corners: the corners of the grid are those of an image; otherwise their outer edges are the same.
        window_side: tokens along a side of the windows that most layers attend within; 0: all layers see all patches.
        resize: how images are resized.
        min_pixels, max_pixels: bounds of the pixels of a resized image.
        tiles: how images are cut, before each part is resized; None: they are not.
        resample: the filter that resizes.
        mean, std: of the colours that the tower expects, as shares of 255.
    """

    image_token: TokenId
    image_break: TokenId | None = None
    template_text: str = ""
    prompt_text: str = ""
    position_rows: Literal[0, 3] = 0
    both_ways: bool = False
    patch_values: Size
    padded: bool = False
    patch_size: Size
    merge_size: Size
    grid_side: Annotated[int, Field(ge=0)] = 0
    grid_corners: bool = True
    window_side: Annotated[int, Field(ge=0)] = 0
    resize: Resize
    min_pixels: Size = 1
    max_pixels: Size
    tiles: Tiles | None = None
    resample: Filter
    mean: Colour
    std: Colour

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a prompt that an image needs."""
        return (self.image_token, *([] if self.image_break is None else [self.image_break]))

    def prompt_tokens(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of a prompt that stand for an image, from its first to its last ``image_token``."""
        row = [self.image_token] * columns
        if self.image_break is None:
            return row * rows
        return ([*row, self.image_break] * rows)[:-1]

    def most_tokens(self, length: int) -> int:
        """Tokens of the largest image that a prompt of fewer than ``length`` tokens holds."""
        whole = (self.side // self.factor) ** 2 if self.resize == "square" else self.max_pixels // self.factor**2
        return min(whole, length - 2)

    def padded_tokens(self, tokens: int) -> int:
        """Return how many tokens the tower computes for ``tokens``: at most an eighth more, or 31."""
        step = max(32, 1 << max(0, tokens.bit_length() - 4))
        return -(-tokens // step) * step if self.padded else tokens

    def working_bytes(self, length: int) -> int:
        """Memory that the tower takes for such an image besides its weights, about: it computes in float32."""
        return self.padded_tokens(self.most_tokens(length)) * self.merge_size**2 * self.patch_values * 4

    @property
    def window_patches(self) -> int:
        """Most patches of a window."""
        return (self.window_side * self.merge_size) ** 2

    @property
    def factor(self) -> int:
        """Pixels along a side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def side(self) -> int:
        """Pixels along a side of a square of the most pixels."""
        return isqrt(self.max_pixels)
