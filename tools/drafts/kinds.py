"""The kinds of drafts that can be trained."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from tools.drafts.dflash import DFlash
from tools.drafts.eagle3 import Eagle3
from tools.drafts.fit import Draft
from tools.drafts.mtp import Mtp
from tools.drafts.pard import Pard
from tools.drafts.peagle import PEagle


class Kind(StrEnum):
    """A kind of draft, named as in a recipe."""

    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    MTP = "mtp"
    PARD = "pard"
    DFLASH = "dflash"

    @property
    def has_full_vocabulary(self) -> bool:
        """Whether it drafts every token of its target, or only the most frequent ones."""
        return self in (Kind.MTP, Kind.PARD)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the drafts of a target, and the states that they read.

    ``features``: layers whose inputs heads read. ``mask``: an id that occurs in no text. ``width``: width of a head's
    MLPs. ``heads``: attention heads of DFlash. ``smaller``: returns the initial model of PARD, on the target's device.
    """

    features: tuple[int, ...]
    mask: int
    width: int
    heads: int
    smaller: Callable[[], Any]


def untrained(kind: Kind, target: Any, tokenizer: Any, sizes: Sizes, drafted: torch.Tensor, seed: int) -> Draft:
    """Return a draft of ``kind`` for ``target``, on its device; ``drafted``: ids that heads draft, ascending."""
    parallel: dict[str, Any] = {"mask": sizes.mask, "seed": seed}
    head: dict[str, Any] = {"features": sizes.features, "width": sizes.width}
    match kind:
        case Kind.EAGLE3:
            return Eagle3(target, drafted, **head).to(target.device)
        case Kind.PEAGLE:
            return PEagle(target, drafted, **head, **parallel).to(target.device)
        case Kind.MTP:
            return Mtp(target).to(target.device)
        case Kind.PARD:
            return Pard(target, sizes.smaller(), tokenizer, **parallel)
        case Kind.DFLASH:
            return DFlash(target, drafted, **head, heads=sizes.heads, **parallel).to(target.device)
