"""What a vision tower reads: how an image becomes patches, and which token stands for an image."""

from typing import Annotated

from pydantic import Field

from tandemrt.engines.validation.records import Record

Size = Annotated[int, Field(ge=1)]
Colour = tuple[float, float, float]  # red, green and blue


class VisionEntry(Record):
    """The images of a bundle. Sides of an image become multiples of ``patch_size`` * ``merge_size`` pixels.

    Attributes:
        image_token: the token that a chat template writes for an image; the runtime repeats it.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of the square that becomes one token.
        grid_side: learned positions along a side; those of a patch are interpolated.
        min_pixels, max_pixels: bounds of the pixels of a resized image.
        mean, std: of the colours that the tower expects, as shares of 255.
    """

    image_token: Annotated[int, Field(ge=0)]
    patch_size: Size
    merge_size: Size
    grid_side: Size
    min_pixels: Size
    max_pixels: Size
    mean: Colour
    std: Colour

    @property
    def factor(self) -> int:
        """Pixels along a side of the square that becomes one token."""
        return self.patch_size * self.merge_size
