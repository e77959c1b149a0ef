"""Mask tokens after the positions of a text, to train drafts that predict a whole draft window in one run.

A position may be followed by up to ``window`` - 1 masks. A mask sees the text up to its position and the masks before
it. All masks of a text are further rows of one call, after the text. Most of them are dropped, more of them at greater
depth, and never one before a mask that is kept: the conditional drop of PARD (arXiv 2504.18583).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tools.drafts.teacher import Lesson, score
from tools.drafts.texts import Batch


class Chains(NamedTuple):
    """Rows of masks: the position that each one follows [batch, rows], -1 for padding, and its depth [batch, rows]."""

    anchors: torch.Tensor
    depths: torch.Tensor


class Rows(NamedTuple):
    """Texts [batch, length] and the masks after them.

    Position and depth of each row [batch, length + rows]; the depth is 0 in the text.
    """

    anchors: torch.Tensor
    depths: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """Positions of the rows, for the rotary embedding."""
        return (self.anchors + self.depths).clamp(min=0)

    @property
    def seen(self) -> torch.Tensor:
        """[batch, 1, rows, rows]: the attention mask."""
        anchors, depths = self
        text = (depths[:, None] == 0) & (anchors[:, None] <= anchors[..., None])
        chain = (anchors[:, None] == anchors[..., None]) & (depths[:, None] <= depths[..., None])
        return (text | chain)[:, None]


def draw(batch: Batch, window: int, kept: float, generator: torch.Generator) -> Chains:
    """Draw the masks of a batch; the tokens that they predict are in the text.

    ``kept``: the share of positions with a mask at one depth that have one at the next.
    """
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
    chains = Chains(*(torch.full((count, int(sizes.max())), fill, device=drawn.device) for fill in (-1, 1)))
    chains.anchors[rows, column] = anchors
    chains.depths[rows, column] = depths + 1
    return chains


def with_masks(ids: torch.Tensor, chains: Chains) -> Rows:
    """Return the rows of texts ``ids`` [batch, length] and of their masks."""
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
    """As Draft.losses. Rows of the text and of masks have equal weight.

    ``states`` [batch, length + rows, hidden] of ``rows``; ``head`` maps them to logits over ``drafted``.
    """
    anchors, depths = rows
    lengths = (batch.ids >= 0).sum(1, keepdim=True)
    # Only tokens of answers are predicted; the last token has no successor, and padding has position -1.
    matters = (anchors >= batch.begins[:, None] - 1) & (anchors >= 0) & (anchors + depths < lengths - 1)
    which, depths, known = matters.nonzero()[:, 0], depths[matters], (anchors + depths)[matters]
    logits, probabilities, best = head(states[matters]), lesson.probabilities[which, known], lesson.best[which, known]
    loss, _ = score(logits, probabilities, best, torch.ones_like(best).float(), drafted)
    foreseen = logits.detach().argmax(-1)
    same = (foreseen if drafted is None else drafted[foreseen]) == best
    here = [depths == depth for depth in range(window)]
    return loss, [(same & each).sum() / each.sum().clamp(min=1) for each in here]
