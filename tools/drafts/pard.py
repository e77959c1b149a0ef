"""A PARD draft in torch, for training: an ordinary model that learns to foresee tokens behind masks.

An, Bai et al., "PARD" (arXiv 2504.18583).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import chains
from tools.drafts.chains import Rows
from tools.drafts.teacher import teach
from tools.drafts.texts import Batch


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
        """See Draft.losses, and chains.losses."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self.target, tokens, (), None)
        rows = self.rows(batch)
        states = self.states(tokens, rows)
        return chains.losses(batch, rows, states, self.draft.lm_head, lesson, self.window, None)

    def rows(self, batch: Batch) -> Rows:
        """The texts of a batch, and masks drawn behind them."""
        return chains.beside(batch.ids, chains.draw(batch, self.window, self.kept, self._generator))

    def states(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[batch, length + rows, hidden]: what the head reads for texts [batch, length] and the masks behind them."""
        masks = rows.anchors.shape[1] - tokens.shape[1]
        found: torch.Tensor = self.draft.model(
            input_ids=torch.cat([tokens, tokens.new_full((len(tokens), masks), self.mask)], 1),
            position_ids=rows.places,
            attention_mask=rows.seen,
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
