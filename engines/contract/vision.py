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


class VisionEntry(Record):
    """The images of a bundle. Sides of an image become multiples of ``patch_size`` * ``merge_size`` pixels.

    Attributes:
        image_token: the token of a prompt that stands for an image; the runtime repeats it.
        image_begin, image_end, image_break: tokens that the runtime writes before and after an image, and between its
            rows; None: there is none.
        template_token: what the chat template writes in place of ``image_token``, which goes on lines of its own
            (Gemma 3); None: it writes ``image_token``.
        position_rows: 3: a token of an image has positions in time, height and width; 0: it has one, as text has.
        both_ways: the tokens of an image attend to each other, also to later ones.
        patch_values: numbers per patch that the tower has in memory at once, about.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of the square that becomes one token.
        grid_side: learned positions along a side; those of a patch are interpolated. 0: there are none.
        window_side: tokens along a side of the windows that most layers attend within; 0: all layers see all patches.
        resize: how images are resized.
        min_pixels, max_pixels: bounds of the pixels of a resized image.
        resample: the filter that resizes.
        mean, std: of the colours that the tower expects, as shares of 255.
    """

    image_token: TokenId
    image_begin: TokenId | None = None
    image_end: TokenId | None = None
    image_break: TokenId | None = None
    template_token: TokenId | None = None
    position_rows: Literal[0, 3] = 0
    both_ways: bool = False
    patch_values: Size
    patch_size: Size
    merge_size: Size
    grid_side: Annotated[int, Field(ge=0)] = 0
    window_side: Annotated[int, Field(ge=0)] = 0
    resize: Resize
    min_pixels: Size = 1
    max_pixels: Size
    resample: Literal["bicubic", "bilinear"]
    mean: Colour
    std: Colour

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a prompt that an image needs."""
        tokens = self.image_token, self.image_begin, self.image_end, self.image_break, self.template_token
        return tuple(token for token in tokens if token is not None)

    def prompt_tokens(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of a prompt that stand for an image, from its first to its last ``image_token``."""
        row = [self.image_token] * columns
        if self.image_break is None:
            return row * rows
        return ([*row, self.image_break] * rows)[:-1]

    def most_tokens(self, length: int) -> int:
        """Tokens of the largest image that a prompt of fewer than ``length`` tokens holds."""
        return min(self.max_pixels // self.factor**2, length - 2)

    def working_bytes(self, length: int) -> int:
        """Memory that the tower takes for such an image besides its weights, about: it computes in float32."""
        return self.most_tokens(length) * self.merge_size**2 * self.patch_values * 4

    @property
    def factor(self) -> int:
        """Pixels along a side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def side(self) -> int:
        """Pixels along a side of a square of the most pixels."""
        return isqrt(self.max_pixels)
