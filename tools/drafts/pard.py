"""A PARD draft in torch, for training: an ordinary model that learns to foresee tokens behind masks.

An, Bai et al., "PARD" (arXiv 2504.18583). Behind a place of a text there may be up to ``window`` - 1 masks, which see
the text up to there and the masks in front of them. All of them stand in one call, as further rows behind the text.
Most are dropped, the further from the text the more, and never one in front of another that is kept: the paper's
conditional drop.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tools.drafts.teacher import score, teach
from tools.drafts.texts import Batch


class Chains(NamedTuple):
    """Rows of masks behind texts: the place that each stands behind [batch, rows], -1 for padding, and its depth."""

    anchors: torch.Tensor
    depths: torch.Tensor


class Pard:
    """``draft`` learns to foresee ``window`` tokens of ``target`` with the token ``mask`` in place of those to come.

    ``kept``: which part of the places with a mask at one depth has one at the next. ``seed``: of what is dropped.
    """

    def __init__(
        self, target: Any, draft: Any, tokenizer: Any, *, mask: int, window: int = 8, kept: float = 0.7, seed: int = 0
    ) -> None:
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.mask, self.window, self.kept = mask, window, kept
        self._generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            table = draft.get_input_embeddings().weight
            table[mask] = table.mean(0)

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """See Draft.parameters_to_learn."""
        return list(self.draft.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See Draft.losses. Rows of the text and of masks weigh the same."""
        tokens, device = batch.ids.clamp(min=0), batch.ids.device
        lesson = teach(self.target, tokens, (), None)
        chains = self.chains(batch)
        place = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        lengths = (batch.ids >= 0).sum(1, keepdim=True)
        inside = (place >= batch.begins[:, None] - 1) & (place < lengths - 1)
        matters = torch.cat([inside, chains.anchors >= 0], 1)
        depths = torch.cat([torch.zeros_like(place), chains.depths], 1)
        known = torch.cat([place, (chains.anchors + chains.depths).clamp(min=0)], 1)  # whose law a row foresees
        logits = self.draft.lm_head(self.states(tokens, chains)[matters])
        rows, known, depths = matters.nonzero()[:, 0], known[matters], depths[matters]
        laws, best = lesson.laws[rows, known], lesson.best[rows, known]
        loss, _ = score(logits, laws, best, torch.ones_like(best).float(), None)
        same = logits.detach().argmax(-1) == best
        here = [depths == depth for depth in range(self.window)]
        return loss, [(same & each).sum() / each.sum().clamp(min=1) for each in here]

    def chains(self, batch: Batch) -> Chains:
        """Draw the masks of a batch; what they foresee is in the text."""
        count, length = batch.ids.shape
        drawn = torch.rand(count, length, generator=self._generator).to(batch.ids.device)
        deepest = (drawn.log() / math.log(self.kept)).clamp(max=self.window - 1).long()
        place = torch.arange(length, device=drawn.device)
        lengths = (batch.ids >= 0).sum(1, keepdim=True)
        deepest = torch.minimum(deepest, lengths - 2 - place).where(place >= batch.begins[:, None] - 1, 0)
        depth = torch.arange(1, self.window, device=drawn.device)
        there = depth <= deepest[..., None]
        rows, anchors, depths = there.nonzero(as_tuple=True)
        sizes = there.sum((1, 2))
        column = torch.arange(len(rows), device=drawn.device) - (sizes.cumsum(0) - sizes)[rows]
        found = Chains(*(torch.full((count, int(sizes.max())), fill, device=drawn.device) for fill in (-1, 1)))
        found.anchors[rows, column] = anchors
        found.depths[rows, column] = depths + 1
        return found

    def states(self, tokens: torch.Tensor, chains: Chains) -> torch.Tensor:
        """[batch, length + rows, hidden]: what the head reads for texts [batch, length] and the masks behind them."""
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        anchors = torch.cat([place, chains.anchors], 1)
        depths = torch.cat([torch.zeros_like(place), chains.depths], 1)
        text = (depths[:, None] == 0) & (anchors[:, None] <= anchors[..., None])
        chain = (anchors[:, None] == anchors[..., None]) & (depths[:, None] <= depths[..., None])
        ids = torch.cat([tokens, torch.full_like(chains.anchors, self.mask)], 1)
        found: torch.Tensor = self.draft.model(
            input_ids=ids,
            position_ids=(anchors + depths).clamp(min=0),
            attention_mask=(text | chain)[:, None],
            use_cache=False,
        ).last_hidden_state
        return found

    def save(self, folder: Path) -> None:
        """See Draft.save. An ordinary checkpoint in float16 with ``pard_token``."""
        weights = {name: each.half().cpu() for name, each in self.draft.state_dict().items()}
        if self.draft.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        self.draft.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        path = folder / "config.json"
        said = {"dtype": "float16", "pard_token": self.mask, "spd_type": "pard"}
        path.write_text(json.dumps(json.loads(path.read_text()) | said, indent=2) + "\n")
