"""A PARD draft in torch, for training: a language model that learns to predict tokens at mask positions.

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
    """``draft`` learns to predict ``window`` tokens of ``target``, with the token ``mask`` in their place.

    ``kept``: the share of positions with a mask at one depth that have one at the next. ``seed``: seed of the drops.
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
        """As Draft.parameters_to_learn."""
        return list(self.draft.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As Draft.losses, see chains.losses."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self.target, tokens, (), None)
        rows = self.rows(batch)
        states = self.states(tokens, rows)
        return chains.losses(batch, rows, states, self.draft.lm_head, lesson, self.window, None)

    def rows(self, batch: Batch) -> Rows:
        """Return the texts of a batch with randomly drawn masks."""
        return chains.with_masks(batch.ids, chains.draw(batch, self.window, self.kept, self._generator))

    def states(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the input of the lm_head [batch, length + rows, hidden] for texts [batch, length] and masks."""
        masks = rows.anchors.shape[1] - tokens.shape[1]
        hidden: torch.Tensor = self.draft.model(
            input_ids=torch.cat([tokens, tokens.new_full((len(tokens), masks), self.mask)], 1),
            position_ids=rows.places,
            attention_mask=rows.seen,
            use_cache=False,
        ).last_hidden_state
        return hidden

    def save(self, folder: Path) -> None:
        """As Draft.save: an ordinary checkpoint in float16 with ``pard_token``."""
        weights = {name: each.half().cpu() for name, each in self.draft.state_dict().items()}
        if self.draft.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        self.draft.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        path = folder / "config.json"
        fields = {"dtype": "float16", "pard_token": self.mask, "spd_type": "pard"}
        path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")
