"""What can be trained."""

from enum import StrEnum


class Kind(StrEnum):
    """A kind of draft, by its name in a recipe."""

    EAGLE3 = "eagle3"
    PARD = "pard"
    DFLASH = "dflash"
