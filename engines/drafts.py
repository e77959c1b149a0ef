"""The kinds of draft, and what each asks of a bundle and of its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DraftKind = Literal["model", "eagle3", "peagle", "mtp", "pard", "dflash", "ngram", "none"]

LONGEST_BLOCK = 17  # tokens of a block draft's call: the newest one, and a mask for every token of the longest window


@dataclass(frozen=True)
class DraftNeeds:
    """What a kind of draft asks for.

    Attributes:
        engines: beside the target's and those that verify.
        features: whether the target gives states of its layers.
        masks: whether the draft is fed a mask token in the place of tokens to come.
        parallel: whether it runs once a round, over what the round before emitted and masks behind it.
        behind: tokens behind a block of the cache that what it holds depends on.
    """

    engines: tuple[str, ...] = ()
    features: bool = False
    masks: bool = False
    parallel: bool = False
    behind: int = 0


_MODEL = ("draft", "propose", "propose_probs")
DRAFTS: Mapping[str, DraftNeeds] = {
    "model": DraftNeeds(_MODEL),
    "eagle3": DraftNeeds(("fuse", *_MODEL), features=True, behind=1),
    "peagle": DraftNeeds(("fuse", *_MODEL), features=True, masks=True, parallel=True, behind=1),
    "mtp": DraftNeeds(("fuse", *_MODEL), features=True, behind=1),
    "pard": DraftNeeds(_MODEL, masks=True, parallel=True),
    "dflash": DraftNeeds(("context", *_MODEL), features=True, masks=True),
    "ngram": DraftNeeds(),
    "none": DraftNeeds(),
}
