"""Masks behind the places of a text, which drafts are trained with that foresee a whole window in one run.

Behind a place there may be up to ``window`` - 1 masks, which see the text up to there and the masks in front of them.
All of them stand in one call, as further rows behind the text. Most are dropped, the further from the text the more,
and never one in front of another that is kept: the conditional drop of PARD (arXiv 2504.18583).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tools.drafts.teacher import Lesson, score
from tools.drafts.texts import Batch


class Chains(NamedTuple):
    """Rows of masks behind texts: the place that each stands behind [batch, rows], -1 for padding, and its depth."""

    anchors: torch.Tensor
    depths: torch.Tensor


class Rows(NamedTuple):
    """Texts [batch, length] and masks behind them: the place that each row stands at or behind, and its depth, 0 in the
    text [batch, length + rows]."""

    anchors: torch.Tensor
    depths: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """Where rows stand, for the rotary embedding."""
        return (self.anchors + self.depths).clamp(min=0)

    @property
    def seen(self) -> torch.Tensor:
        """[batch, 1, rows, rows]: what each row sees."""
        anchors, depths = self
        text = (depths[:, None] == 0) & (anchors[:, None] <= anchors[..., None])
        chain = (anchors[:, None] == anchors[..., None]) & (depths[:, None] <= depths[..., None])
        return (text | chain)[:, None]


def draw(batch: Batch, window: int, kept: float, generator: torch.Generator) -> Chains:
    """Draw the masks of a batch; what they foresee is in the text. ``kept``: which part of the places with a mask at
    one depth has one at the next."""
    count, length = batch.ids.shape
    drawn = torch.rand(count, length, generator=generator).to(batch.ids.device)
    deepest = (drawn.log() / math.log(kept)).clamp(max=window - 1).long()
    place = torch.arange(length, device=drawn.device)
    lengths = (batch.ids >= 0).sum(1, keepdim=True)
    deepest = torch.minimum(deepest, lengths - 2 - place).where(place >= batch.begins[:, None] - 1, 0)
    depth = torch.arange(1, window, device=drawn.device)
    there = depth <= deepest[..., None]
    rows, anchors, depths = there.nonzero(as_tuple=True)
    sizes = there.sum((1, 2))
    column = torch.arange(len(rows), device=drawn.device) - (sizes.cumsum(0) - sizes)[rows]
    found = Chains(*(torch.full((count, int(sizes.max())), fill, device=drawn.device) for fill in (-1, 1)))
    found.anchors[rows, column] = anchors
    found.depths[rows, column] = depths + 1
    return found


def beside(ids: torch.Tensor, chains: Chains) -> Rows:
    """The rows of texts ``ids`` [batch, length] and of the masks behind them."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return Rows(torch.cat([place, chains.anchors], 1), torch.cat([torch.zeros_like(place), chains.depths], 1))


def losses(
    batch: Batch,
    rows: Rows,
    states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    lesson: Lesson,
    window: int,
    drafted: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See Draft.losses. Rows of the text and of masks weigh the same.

    ``states`` [batch, length + rows, hidden] of ``rows``, of which ``head`` makes logits over ``drafted``.
    """
    anchors, depths = rows
    lengths = (batch.ids >= 0).sum(1, keepdim=True)
    # An answer's tokens are foreseen; behind the last one nothing is known, and padding stands at -1.
    matters = (anchors >= batch.begins[:, None] - 1) & (anchors >= 0) & (anchors + depths < lengths - 1)
    which, depths, known = matters.nonzero()[:, 0], depths[matters], (anchors + depths)[matters]
    logits, laws, best = head(states[matters]), lesson.laws[which, known], lesson.best[which, known]
    loss, _ = score(logits, laws, best, torch.ones_like(best).float(), drafted)
    foreseen = logits.detach().argmax(-1)
    same = (foreseen if drafted is None else drafted[foreseen]) == best
    here = [depths == depth for depth in range(window)]
    return loss, [(same & each).sum() / each.sum().clamp(min=1) for each in here]
