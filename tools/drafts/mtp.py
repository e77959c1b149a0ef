"""A multi-token prediction (MTP) layer in torch, for training: a decoder layer after the target's last one.

DeepSeek-AI, "DeepSeek-V3" (arXiv 2412.19437). It reads its own state, so one layer drafts any number of tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import checkpoint
from tools.drafts.feedback import FeedbackHead
from tools.drafts.layers import Attend, Layer, fusion, last_norm


class Mtp(FeedbackHead):
    """A layer for ``target``, a Llama or Qwen3, with its embedding and lm_head, trained for ``ahead`` tokens.

    It is initialized from the target's last layer, reading only the target's last state, and from its last norm.
    """

    def __init__(self, target: Any, *, ahead: int = 4) -> None:
        config, last = target.config, target.model.layers[-1]
        super().__init__(target, None, [config.num_hidden_layers], ahead)
        hidden, heads = config.hidden_size, config.num_attention_heads
        normed = hasattr(last.self_attn, "q_norm")
        self.enorm, self.hnorm = (nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(2))
        self.norm = last_norm(target)
        self.eh_proj = fusion(2, hidden)
        self.layer = Layer(config, last, inner=hidden, heads=heads, width=config.intermediate_size, normed=normed)
        self.layer.load_state_dict(last.state_dict())

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """As FeedbackHead.begin: the target's states after its last norm."""
        return features

    def step(
        self, embedded: torch.Tensor, state: torch.Tensor, places: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As FeedbackHead.step. It feeds back the state after the layer's last norm."""
        stream = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        last = self.norm(self.layer(stream, self.layer.input_layernorm(stream), places, attend))
        return self._target[0].lm_head(last), last

    def save(self, folder: Path) -> None:
        """As Draft.save, in DeepSeek's format: the layer alone, with the config of its target."""
        prefix = f"model.layers.{self._target[0].config.num_hidden_layers}."
        names = {"norm.": "shared_head.norm.", "layer.": ""}
        tensors = {}
        for name, tensor in self.state_dict().items():
            part = next((part for part in names if name.startswith(part)), "")
            tensors[prefix + names.get(part, "") + name.removeprefix(part)] = tensor
        config = self._target[0].config.to_dict() | {"num_nextn_predict_layers": 1}
        checkpoint.write(folder, tensors, config)
