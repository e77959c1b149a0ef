"""What a vision tower reads: how an image becomes patches, and which token stands for an image."""

from typing import Annotated, Literal

from pydantic import Field

from tandemrt.engines.validation.records import Record

Size = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
Colour = tuple[float, float, float]  # red, green and blue


class VisionEntry(Record):
    """The images of a bundle. Sides of an image become multiples of ``patch_size`` * ``merge_size`` pixels.

    Attributes:
        image_token: the token of a prompt that stands for an image; the runtime repeats it.
        image_begin, image_end: tokens before and after it. The chat template writes the first one alone, and the
            runtime the others. None: the template writes ``image_token``.
        position_rows: 3: a token of an image has positions in time, height and width; 0: it has one, as text has.
        both_ways: the tokens of an image attend to each other, also to later ones.
        patch_values: numbers per patch that the tower has in memory at once, about.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of the square that becomes one token.
        grid_side: learned positions along a side; those of a patch are interpolated. 0: there are none.
        window_side: tokens along a side of the windows that most layers attend within; 0: all layers see all patches.
        side: every image is stretched to a square of such a side in pixels; None: it keeps its shape.
        min_pixels, max_pixels: bounds of the pixels of a resized image.
        resample: the filter that resizes.
        mean, std: of the colours that the tower expects, as shares of 255.
    """

    image_token: TokenId
    image_begin: TokenId | None
    image_end: TokenId | None
    position_rows: Literal[0, 3]
    both_ways: bool
    patch_values: Size
    patch_size: Size
    merge_size: Size
    grid_side: Annotated[int, Field(ge=0)]
    window_side: Annotated[int, Field(ge=0)]
    side: Size | None
    min_pixels: Size
    max_pixels: Size
    resample: Literal["bicubic", "bilinear"]
    mean: Colour
    std: Colour

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a prompt that an image needs."""
        tokens = self.image_begin, self.image_token, self.image_end
        return tuple(token for token in tokens if token is not None)

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
