"""A P-EAGLE head in torch, for training: as EAGLE-3, but it drafts all tokens in one run, with masks that have a state.

"P-EAGLE" (arXiv 2602.01469), in the format of ``speculators``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import chains, checkpoint
from tools.drafts.chains import Rows
from tools.drafts.eagle3 import PairLayer, head_config
from tools.drafts.layers import Layer, fusion, last_norm, masked, reduced_head
from tools.drafts.teacher import Lesson, teach
from tools.drafts.texts import Batch


class PEagle(nn.Module):
    """A head of ``target`` that drafts the tokens ``vocabulary`` (ascending ids of the target).

    It reads the inputs of the target's layers ``features``; its MLPs have width ``width``. ``mask``: an id of the
    target that occurs in no text, in place of future tokens. It is trained for ``window`` tokens; ``kept`` and ``seed``
    as in Pard.
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
        self._target = [target]  # in a list, so that it is not a submodule
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.fc = fusion(len(self.features), hidden)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.features) * hidden))
        last = target.model.layers[-1]
        further = [Layer(config, last, inner=hidden, heads=heads, width=width, normed=False) for _ in range(layers - 1)]
        self.layers = nn.ModuleList([PairLayer(target, width), *further])
        self.norm, self.lm_head = last_norm(target), reduced_head(target, vocabulary)
        with torch.no_grad():
            for (
                layer
            ) in further:  # the first layer starts as the target's last one; the others start with small outputs
                layer.self_attn.o_proj.weight.mul_(0.1)
                layer.mlp.down_proj.weight.mul_(0.1)

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """As Draft.parameters_to_learn."""
        return list(self.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As Draft.losses, see chains.losses. The pair of a token predicts the next token."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self._target[0], tokens, self.features, self.vocabulary)
        pairs = self.pairs(batch)
        rows = self.rows(pairs)
        states = self.states(pairs.ids.clamp(min=0), lesson.features[:, :-1], rows)
        following = Lesson(*(each[:, 1:] for each in lesson))
        return chains.losses(pairs, rows, states, self.lm_head, following, self.window, self.vocabulary)

    def pairs(self, batch: Batch) -> Batch:
        """Return the tokens of pairs: all tokens of a text but the first, each with the state of the previous token."""
        return Batch(batch.ids[:, 1:], batch.begins - 1)

    def rows(self, pairs: Batch) -> Rows:
        """Return the pairs of a batch with randomly drawn masks."""
        return chains.with_masks(pairs.ids, chains.draw(pairs, self.window, self.kept, self._generator))

    def states(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return states [batch, length + rows, hidden], the input of ``lm_head``.

        They belong to pairs of ``tokens`` [batch, length] and ``features`` [batch, length, layers * hidden], and to
        masks.
        """
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
        normed: torch.Tensor = self.norm(state)
        return normed

    def save(self, folder: Path) -> None:
        """As Draft.save, in the format of ``speculators``."""
        layers, fields = head_config(self._target[0], self.layers, self.features)
        fields |= {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "mask_token_id": self.mask,
        }
        checkpoint.save(folder, self.state_dict(), self.vocabulary, self._target[0], layers, fields)
