"""A layer that predicts tokens further on (MTP) in torch, for training: an ordinary layer behind the target's last.

DeepSeek-AI, "DeepSeek-V3" (arXiv 2412.19437). It is fed its own state, so one layer drafts any number of tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import checkpoint
from tools.drafts.feedback import FeedbackHead
from tools.drafts.layers import Attend, Layer, fusion, last_norm


class Mtp(FeedbackHead):
    """The layer of ``target``, a Llama or Qwen3 whose embedding and head it shares, trained for ``ahead`` tokens.

    It begins as the target's last layer, over the target's last state alone, and with the target's last norm.
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
        """See FeedbackHead.begin. The target's states behind its last norm, as they are."""
        return features

    def step(
        self, embedded: torch.Tensor, state: torch.Tensor, places: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See FeedbackHead.step. Fed back is the state behind the layer's last norm."""
        stream = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        last = self.norm(self.layer(stream, self.layer.input_layernorm(stream), places, attend))
        return self._target[0].lm_head(last), last

    def save(self, folder: Path) -> None:
        """See Draft.save. In DeepSeek's form, the layer alone, with the config of its target."""
        prefix = f"model.layers.{self._target[0].config.num_hidden_layers}."
        names = {"norm.": "shared_head.norm.", "layer.": ""}
        tensors = {}
        for name, tensor in self.state_dict().items():
            part = next((part for part in names if name.startswith(part)), "")
            tensors[prefix + names.get(part, "") + name.removeprefix(part)] = tensor
        config = self._target[0].config.to_dict() | {"num_nextn_predict_layers": 1}
        checkpoint.write(folder, tensors, config)
