"""A DFlash draft in torch, for training: blocks of masks over the target's states (arXiv 2602.06036).

A text is trained with many blocks. Each block follows its own anchor and does not see other blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import checkpoint
from tools.drafts.layers import Attend, Layer, fusion, last_norm, masked, reduced_head
from tools.drafts.teacher import score, teach
from tools.drafts.texts import Batch


class DFlash(nn.Module):
    """A draft of ``target`` that drafts the tokens ``vocabulary`` (ascending ids of the target) in blocks.

    It reads the inputs of the target's layers ``features``. Its layers have ``heads`` attention heads with the target's
    head_dim and grouping, and MLPs of width ``width``, initialized from parts of the target's last layers. ``mask``: an
    id of the target that occurs in no text. ``anchors``: blocks per text in a step, drawn with ``seed``.
    """

    vocabulary: torch.Tensor

    def __init__(
        self,
        target: Any,
        vocabulary: torch.Tensor,
        *,
        features: Sequence[int],
        heads: int,
        width: int,
        mask: int,
        layers: int = 2,
        block: int = 8,
        anchors: int = 24,
        seed: int = 0,
    ) -> None:
        super().__init__()
        config, hidden = target.config, target.config.hidden_size
        self.features, self.mask, self.block, self.anchors = tuple(features), mask, block, anchors
        self.heads, self.width = heads, width
        self._generator = torch.Generator().manual_seed(seed)
        self._target = [target]  # in a list, so that it is not a submodule
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.fc = fusion(len(self.features), hidden)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Layer(config, like, inner=hidden, heads=heads, width=width, normed=True)
            for like in target.model.layers[-layers:]
        )
        self.norm, self.lm_head = last_norm(target), reduced_head(target, vocabulary)

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """As Draft.parameters_to_learn."""
        return list(self.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As Draft.losses. The weight of a token falls with its distance from the anchor, as published."""
        tokens, device = batch.ids.clamp(min=0), batch.ids.device
        lesson = teach(self._target[0], tokens, self.features, self.vocabulary)
        lengths = (batch.ids >= 0).sum(1)
        drawn = torch.rand(len(tokens), self.anchors, generator=self._generator).to(device)
        first = batch.begins - 1  # the anchor is the last token of a prompt, or a token of the answer
        anchors = first[:, None] + (drawn * (lengths - 1 - first)[:, None]).long()
        logits = self(tokens, lesson.features, anchors)
        ahead = torch.arange(1, self.block, device=device)
        places = anchors[..., None] + ahead  # positions of the predicted tokens
        inside = places < lengths[:, None, None]
        rows = torch.arange(len(tokens), device=device)[:, None, None]
        known = (places - 1).clamp(max=tokens.shape[1] - 1)
        probabilities, best = lesson.probabilities[rows, known], lesson.best[rows, known]
        decay = torch.exp(-(ahead - 1) / (self.block / 2))
        loss, _ = score(logits, probabilities, best, inside * decay, self.vocabulary)
        right = (self.vocabulary[logits.detach().argmax(-1)] == best) & inside
        return loss, list(right.sum((0, 1)) / inside.sum((0, 1)).clamp(min=1))

    def forward(self, ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, anchors, block - 1, draft vocabulary] of the tokens after ``anchors`` [batch, anchors].

        ``ids`` [batch, length], ``features`` [batch, length, layers * hidden]. A block does not see the text from its
        own positions on.
        """
        device, block = ids.device, self.block
        within = torch.arange(block, device=device)
        places = (anchors[..., None] + within).flatten(1)
        whose = torch.arange(anchors.shape[1], device=device).repeat_interleave(block)
        context = torch.arange(ids.shape[1], device=device)
        seen = context < anchors.repeat_interleave(block, 1)[..., None]
        own = (whose[:, None] == whose).expand(len(ids), -1, -1)
        mask = torch.cat([seen, own], -1)[:, None]
        known = torch.full_like(places, self.mask).view(*anchors.shape, block)
        known[..., 0] = ids.gather(1, anchors)
        with torch.no_grad():
            x = self._target[0].model.embed_tokens(known.flatten(1))
        state = self.hidden_norm(self.fc(features))
        layer: Any
        for layer in self.layers:
            attend = _attend_after(layer.self_attn.keys_and_values(state, context), mask)
            x = layer(x, layer.input_layernorm(x), places, attend)
        x = x.view(*anchors.shape, block, -1)[:, :, 1:]
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits

    def save(self, folder: Path) -> None:
        """As Draft.save, in the format of ``speculators``."""
        config = self._target[0].config
        layers = {
            "model_type": "qwen3",
            "head_dim": config.head_dim,
            "intermediate_size": self.width,
            "num_attention_heads": self.heads,
            "num_hidden_layers": len(self.layers),
            "num_key_value_heads": self.heads * config.num_key_value_heads // config.num_attention_heads,
        }
        fields = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": list(self.features),
            "block_size": self.block,
            "mask_token_id": self.mask,
            "sample_from_anchor": False,
        }
        checkpoint.save(folder, self.state_dict(), self.vocabulary, self._target[0], layers, fields)


def _attend_after(text: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> Attend:
    """Attention over the keys and values of a ``text``, followed by those of the layer."""
    (keys, values), attend = text, masked(mask)
    return lambda query, key, value: attend(query, torch.cat([keys, key], 2), torch.cat([values, value], 2))
