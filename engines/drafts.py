"""The kinds of draft, and what each asks of a bundle and of its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DraftKind = Literal["model", "eagle3", "peagle", "mtp", "pard", "dflash", "dspark", "ngram", "none"]

# Layers that each draft a token of their own (MTP), the first of them as any other draft is called.
DRAFT_LAYERS: tuple[Literal["draft", "draft_2", "draft_3", "draft_4"], ...] = ("draft", "draft_2", "draft_3", "draft_4")
LONGEST_BLOCK = 17  # tokens of a block draft's call: the newest one, and a mask for every token of the longest window


@dataclass(frozen=True)
class DraftNeeds:
    """What a kind of draft asks for.

    Attributes:
        engines: beside the target's and those that verify.
        features: whether the target gives states of its layers.
        masks: whether the draft is fed a mask token in the place of tokens to come.
        parallel: whether it runs once a round, over what the round before emitted and masks behind it.
        block: whether it runs once a round, over the newest token and masks, always as many as its block has room for.
        behind: tokens behind a block of the cache that what it holds depends on.
    """

    engines: tuple[str, ...] = ()
    features: bool = False
    masks: bool = False
    parallel: bool = False
    block: bool = False
    behind: int = 0

    @property
    def draws(self) -> bool:
        """Whether it has a law of tokens to draw from."""
        return bool(self.engines)


_MODEL = ("draft", "propose", "propose_probs")
DRAFTS: Mapping[str, DraftNeeds] = {
    "model": DraftNeeds(_MODEL),
    "eagle3": DraftNeeds(("fuse", *_MODEL), features=True, behind=1),
    "peagle": DraftNeeds(("fuse", *_MODEL), features=True, masks=True, parallel=True, behind=1),
    "mtp": DraftNeeds(("fuse", *_MODEL), features=True, behind=1),
    "pard": DraftNeeds(_MODEL, masks=True, parallel=True),
    "dflash": DraftNeeds(("context", *_MODEL), features=True, masks=True, block=True),
    "dspark": DraftNeeds(("context", "markov", *_MODEL), features=True, masks=True, block=True),
    "ngram": DraftNeeds(),
    "none": DraftNeeds(),
}


def longest_window(block: int, *, sample_from_anchor: bool) -> int:
    """Tokens that a ``block`` foresees: one for each of its own, the newest token (the anchor) left out unless it is
    sampled from."""
    return block if sample_from_anchor else block - 1
