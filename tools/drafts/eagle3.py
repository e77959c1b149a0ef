"""An EAGLE-3 head in torch, for training: one layer over the target's states, then over its own.

Li et al., "EAGLE-3" (arXiv 2503.01840).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import checkpoint
from tools.drafts.feedback import FeedbackHead
from tools.drafts.layers import Attend, Layer, fusion, last_norm, reduced_head


class Eagle3(FeedbackHead):
    """A head of ``target`` that drafts the tokens ``vocabulary`` (ascending ids of the target).

    It reads the inputs of the target's layers ``features``; its MLP has width ``width``. It is trained for ``ahead``
    drafted tokens. It is initialized from the target's last layer, last norm and embedding.
    """

    vocabulary: torch.Tensor

    def __init__(
        self, target: Any, vocabulary: torch.Tensor, *, features: Sequence[int], width: int, ahead: int = 4
    ) -> None:
        super().__init__(target, vocabulary, features, ahead)
        hidden = target.config.hidden_size
        self.fc = fusion(len(self.features), hidden)
        self.layers = nn.ModuleList([PairLayer(target, width)])
        self.norm, self.lm_head = last_norm(target), reduced_head(target, vocabulary)

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """As FeedbackHead.begin."""
        state: torch.Tensor = self.fc(features)
        return state

    def step(
        self, embedded: torch.Tensor, state: torch.Tensor, places: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As FeedbackHead.step. It feeds back the state before the last norm."""
        state = self.layers[0](embedded, state, places, attend)
        return self.lm_head(self.norm(state)), state

    def save(self, folder: Path) -> None:
        """As Draft.save, in the format of ``speculators``."""
        layers, fields = head_config(self._target[0], self.layers, self.features)
        fields |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        checkpoint.save(folder, self.state_dict(), self.vocabulary, self._target[0], layers, fields)


class PairLayer(Layer):
    """The first layer of a head. Its attention reads the embedding of a token and the state of the previous token."""

    def __init__(self, target: Any, width: int) -> None:
        config = target.config
        sizes = {"inner": 2 * config.hidden_size, "heads": config.num_attention_heads, "width": width}
        super().__init__(config, target.model.layers[-1], **sizes, normed=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        with torch.no_grad():
            self.self_attn.o_proj.weight.mul_(0.1)

    def forward(
        self, embedded: torch.Tensor, state: torch.Tensor, places: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Map embeddings and states [batch, length, hidden] to states."""
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        return super().forward(state, read, places, attend)


def head_config(target: Any, layers: nn.ModuleList, features: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of config.json for the layers of a head and for the head, see ``checkpoint.save``."""
    first: Any = layers[0]
    of_layers = {
        "model_type": "llama",
        "head_dim": target.config.head_dim,
        "intermediate_size": first.mlp.gate_proj.out_features,
        "mlp_bias": False,
        "num_attention_heads": target.config.num_attention_heads,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": target.config.num_key_value_heads,
    }
    return of_layers, {"eagle_aux_hidden_state_layer_ids": list(features), "norm_before_residual": False}
