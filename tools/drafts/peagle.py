"""A P-EAGLE head in torch, for training: as EAGLE-3, but a whole window in one run, behind masks with a state.

"P-EAGLE" (arXiv 2602.01469), in the form of ``speculators``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import chains, checkpoint
from tools.drafts.chains import Rows
from tools.drafts.eagle3 import PairLayer, head_config
from tools.drafts.layers import Layer, fusion, last_norm, masked, narrow_head
from tools.drafts.teacher import Lesson, teach
from tools.drafts.texts import Batch


class PEagle(nn.Module):
    """The head of ``target``, which drafts the tokens ``vocabulary`` (ascending ids of the target).

    It reads the inputs of the target's layers ``features``; its MLPs are ``width`` wide. ``mask``: an id of the target
    that no text has, in place of tokens to come. It is trained for ``window`` tokens; ``kept`` and ``seed`` as of Pard.
    """

    vocabulary: torch.Tensor

    def __init__(
        self,
        target: Any,
        vocabulary: torch.Tensor,
        *,
        features: Sequence[int],
        width: int,
        mask: int,
        layers: int = 2,
        window: int = 8,
        kept: float = 0.7,
        seed: int = 0,
    ) -> None:
        super().__init__()
        config = target.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.features, self.mask, self.window, self.kept = tuple(features), mask, window, kept
        self._generator = torch.Generator().manual_seed(seed)
        self._target = [target]  # in a list: no part of the head
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.fc = fusion(len(self.features), hidden)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.features) * hidden))
        last = target.model.layers[-1]
        further = [Layer(config, last, inner=hidden, heads=heads, width=width, normed=False) for _ in range(layers - 1)]
        self.layers = nn.ModuleList([PairLayer(target, width), *further])
        self.norm, self.lm_head = last_norm(target), narrow_head(target, vocabulary)
        with torch.no_grad():
            for layer in further:  # the first stands for the target's last one; these begin with little to add
                layer.self_attn.o_proj.weight.mul_(0.1)
                layer.mlp.down_proj.weight.mul_(0.1)

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """See Draft.parameters_to_learn."""
        return list(self.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See Draft.losses, and chains.losses. The pair of a token foresees what stands behind that token."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self._target[0], tokens, self.features, self.vocabulary)
        pairs = self.pairs(batch)
        rows = self.rows(pairs)
        states = self.states(pairs.ids.clamp(min=0), lesson.features[:, :-1], rows)
        behind = Lesson(*(each[:, 1:] for each in lesson))
        return chains.losses(pairs, rows, states, self.lm_head, behind, self.window, self.vocabulary)

    def pairs(self, batch: Batch) -> Batch:
        """The tokens of pairs: all of a text but its first, each of which goes with the state of the one before."""
        return Batch(batch.ids[:, 1:], batch.begins - 1)

    def rows(self, pairs: Batch) -> Rows:
        """The pairs of a batch, and masks drawn behind them."""
        return chains.beside(pairs.ids, chains.draw(pairs, self.window, self.kept, self._generator))

    def states(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[batch, length + rows, hidden]: what ``lm_head`` reads for pairs of ``tokens`` [batch, length] and
        ``features`` [batch, length, layers * hidden], and for the masks behind them."""
        masks = rows.anchors.shape[1] - tokens.shape[1]
        ids = torch.cat([tokens, tokens.new_full((len(tokens), masks), self.mask)], 1)
        with torch.no_grad():
            embedded = self._target[0].model.embed_tokens(ids)
        state = self.fc(torch.cat([features, self.mask_hidden.expand(len(tokens), masks, -1)], 1))
        attend, places = masked(rows.seen), rows.places
        state = self.layers[0](embedded, state, places, attend)
        layer: Any
        for layer in self.layers[1:]:
            state = layer(state, layer.input_layernorm(state), places, attend)
        found: torch.Tensor = self.norm(state)
        return found

    def save(self, folder: Path) -> None:
        """See Draft.save. In the form of ``speculators``."""
        layers, said = head_config(self._target[0], self.layers, self.features)
        said |= {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": self.mask}
        checkpoint.save(folder, self.state_dict(), self.vocabulary, self._target[0], layers, said)
