"""The kinds of drafts: one row of data per kind, with what it needs of a bundle and of a round."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DraftKind = Literal["model", "eagle3", "peagle", "mtp", "pard", "dflash", "dspark", "ngram", "none"]

# Engines of MTP layers: each drafts one token. The first has the name that every other draft model has.
DRAFT_LAYERS: tuple[Literal["draft", "draft_2", "draft_3", "draft_4"], ...] = ("draft", "draft_2", "draft_3", "draft_4")
MAX_BLOCK_DRAFT = 17  # tokens of a block draft's call: the newest token and one mask per token of the longest window


@dataclass(frozen=True)
class DraftTraits:
    """Requirements of a kind of draft.

    Attributes:
        engines: engines in addition to the target's and to those that verify.
        features: the target outputs hidden states of its layers for the draft.
        masks: the draft is fed a mask token in place of each token to predict.
        parallel: one call per round, over the tokens that the previous round emitted followed by masks.
        block: one call per round, over the newest token followed by masks; the call always has the length of the
            draft's block.
        lookahead: tokens after a KV cache block that the contents of the block depend on.
    """

    engines: tuple[str, ...] = ()
    features: bool = False
    masks: bool = False
    parallel: bool = False
    block: bool = False
    lookahead: int = 0

    @property
    def samples(self) -> bool:
        """Whether the draft has a distribution to sample from."""
        return bool(self.engines)


_MODEL = ("draft", "propose", "propose_probs")
DRAFT_KINDS: Mapping[str, DraftTraits] = {
    "model": DraftTraits(_MODEL),
    "eagle3": DraftTraits(("fuse", *_MODEL), features=True, lookahead=1),
    "peagle": DraftTraits(("fuse", *_MODEL), features=True, masks=True, parallel=True, lookahead=1),
    "mtp": DraftTraits(("fuse", *_MODEL), features=True, lookahead=1),
    "pard": DraftTraits(_MODEL, masks=True, parallel=True),
    "dflash": DraftTraits(("context", *_MODEL), features=True, masks=True, block=True),
    "dspark": DraftTraits(("context", "markov", *_MODEL), features=True, masks=True, block=True),
    "ngram": DraftTraits(),
    "none": DraftTraits(),
}


def max_block_drafts(block: int, *, sample_from_anchor: bool) -> int:
    """Return the tokens that a block draft with a call of ``block`` tokens predicts.

    Each mask predicts one token. The newest token (the anchor) predicts one with ``sample_from_anchor``.
    """
    return block if sample_from_anchor else block - 1
