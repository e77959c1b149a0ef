"""An EAGLE-3 head in torch, for training: one layer over the target's states, and over what it made itself.

Li et al., "EAGLE-3" (arXiv 2503.01840). In training a row stands for a place of the text: its first step sees the
target's states up to there, each further step also what the steps before made at that very place, as drafting will.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.drafts import checkpoint
from tools.drafts.layers import Mlp, fusion, linear, rotated, split
from tools.drafts.teacher import score, teach
from tools.drafts.texts import Batch


class Eagle3(nn.Module):
    """The head of ``target``, which drafts the tokens ``vocabulary`` (ascending ids of the target).

    It reads the inputs of the target's layers ``features``; its MLP is ``width`` wide, and it is trained for ``ahead``
    drafted tokens. It begins with what the target's last layer, last norm and embedding hold, so little is left to
    learn.
    """

    vocabulary: torch.Tensor

    def __init__(
        self, target: Any, vocabulary: torch.Tensor, *, features: Sequence[int], width: int, ahead: int = 4
    ) -> None:
        super().__init__()
        config = target.config
        hidden, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]
        self.features, self.width, self.ahead = tuple(features), width, ahead
        self._target = [target]  # in a list: no part of the head
        last = target.model.layers[-1]
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.fc = fusion(len(self.features), hidden)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(4)
        )
        self.q_proj = linear(2 * hidden, self.heads * self.head_dim)
        self.k_proj, self.v_proj = (linear(2 * hidden, self.kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = linear(self.heads * self.head_dim, hidden)
        self.mlp = Mlp(last, width)
        self.lm_head = linear(hidden, len(vocabulary))
        with torch.no_grad():
            self.o_proj.weight.mul_(0.1)
            self.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.lm_head.weight[vocabulary])

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """See Draft.parameters_to_learn."""
        return list(self.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See Draft.losses. For each step the divergence from the target's law over the draft's vocabulary."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self._target[0], tokens, self.features, self.vocabulary)
        answers = torch.arange(tokens.shape[1], device=tokens.device) >= batch.begins[:, None] - 1
        matters = ((batch.ids >= 0) & answers).float()
        total, right = tokens.new_zeros((), dtype=torch.float32), []
        for step, logits in enumerate(self(tokens, lesson.features, self.ahead)):
            places = (slice(None), slice(1 + step, None))  # whose law a row of this step foresees
            loss, found = score(logits, lesson.laws[places], lesson.best[places], matters[places], self.vocabulary)
            total = total + loss * 0.8**step
            right.append(found)
        return total, right

    def forward(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits [batch, length - 1 - step, draft vocabulary] of each step.

        ``ids`` [batch, length], ``features`` [batch, length, layers * hidden]. Row j of step s foresees the token at
        j + 2 + s: it has the state of token j and the tokens up to j + 1 + s.
        """
        state = self.fc(features[:, :-1])
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for step in range(steps):
            state = state[:, : ids.shape[1] - 1 - step]
            state = self._layer(ids[:, 1 + step :], state, cache, step)
            found.append(self.lm_head(self.norm(state)))
        return found

    def _layer(
        self, ids: torch.Tensor, state: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]], step: int
    ) -> torch.Tensor:
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device) + step
        with torch.no_grad():
            embedded = self._target[0].model.embed_tokens(ids)
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        query, key = (rotated(split(each(x), self.head_dim), places, self.theta) for each in (self.q_proj, self.k_proj))
        value = split(self.v_proj(x), self.head_dim)
        group = self.heads // self.kv_heads
        cache.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        first_key, first_value = (each[:, :, :length] for each in cache[0])
        scores = query @ first_key.transpose(2, 3)
        later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        own = [(query * key[:, :, :length]).sum(-1, keepdim=True) for key, _ in cache[1:]]
        weights = (torch.cat([scores, *own], -1) / self.head_dim**0.5).softmax(-1)
        mixed = weights[..., :length] @ first_value
        for at, (_, value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., length + at, None] * value[:, :, :length]
        state = state + self.o_proj(mixed.transpose(1, 2).flatten(2))
        moved: torch.Tensor = self.mlp(self.post_attention_layernorm(state))
        return state + moved

    def save(self, folder: Path) -> None:
        """See Draft.save. In the form of ``speculators``."""
        weights = self.state_dict()
        layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
        names = {name: f"layers.0.{name}" for name in (*layer, "mlp.down_proj")}
        names |= {name: f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        names |= {name: name for name in ("fc", "norm", "lm_head")}
        layers = {
            "model_type": "llama",
            "head_dim": self.head_dim,
            "intermediate_size": self.width,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.kv_heads,
        }
        said = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": list(self.features),
            "norm_before_residual": False,
        }
        tensors = {f"{name}.weight": weights[f"{module}.weight"] for module, name in names.items()}
        checkpoint.save(folder, tensors, self.vocabulary, self._target[0], layers, said)
