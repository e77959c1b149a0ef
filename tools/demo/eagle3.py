"""An EAGLE-3 head in torch, for training: one layer over the target's states, and over what it made itself.

Li et al., "EAGLE-3" (arXiv 2503.01840). In training a row stands for a place of the text: its first step sees the
target's states up to there, each further step also what the steps before made at that very place, as drafting will.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

FEATURES = (1, 3, 5)
"""The target's layers whose inputs the head reads; its six are too few for the published default."""


class Eagle3(nn.Module):
    """The head of ``target``, which drafts the tokens ``vocabulary`` (ascending ids of the target).

    It begins with what the target's last layer, last norm and embedding hold, so little is left to learn.
    """

    def __init__(self, target: Any, vocabulary: torch.Tensor) -> None:
        super().__init__()
        config = target.config
        hidden, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]
        last = target.model.layers[-1]
        self.vocabulary = vocabulary
        self.embed_tokens = target.model.embed_tokens
        self.fc = _linear(len(FEATURES) * hidden, hidden)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(4)
        )
        self.q_proj = _linear(2 * hidden, self.heads * self.head_dim)
        self.k_proj, self.v_proj = (_linear(2 * hidden, self.kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = _linear(self.heads * self.head_dim, hidden)
        self.gate_proj, self.up_proj = (_linear(hidden, config.intermediate_size) for _ in range(2))
        self.down_proj = _linear(config.intermediate_size, hidden)
        self.lm_head = _linear(hidden, len(vocabulary))
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)
            self.o_proj.weight.mul_(0.1)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(self, name).weight.copy_(getattr(last.mlp, name).weight)
            self.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.lm_head.weight[vocabulary])

    def forward(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits [batch, length - 1 - step, draft vocabulary] of each step.

        ``ids`` [batch, length], ``features`` [batch, length, 3 * hidden]. Row j of step s foresees the token at
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
        with torch.no_grad():
            embedded = self.embed_tokens(ids)
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        query, key = self._rotated(self.q_proj(x), step), self._rotated(self.k_proj(x), step)
        value = self._split(self.v_proj(x))
        group = self.heads // self.kv_heads
        cache.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        first_key, first_value = (each[:, :, :length] for each in cache[0])
        scores = query @ first_key.transpose(2, 3)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        own = [(query * key[:, :, :length]).sum(-1, keepdim=True) for key, _ in cache[1:]]
        weights = (torch.cat([scores, *own], -1) / self.head_dim**0.5).softmax(-1)
        mixed = weights[..., :length] @ first_value
        for at, (_, value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., length + at, None] * value[:, :, :length]
        state = state + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(state)
        moved: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return state + moved

    def _rotated(self, flat: torch.Tensor, step: int) -> torch.Tensor:
        x = self._split(flat)
        half = self.head_dim // 2
        frequencies = 1.0 / self.theta ** (torch.arange(half).float() / half)
        angles = (torch.arange(x.shape[2]) + step)[:, None] * frequencies
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        turned: torch.Tensor = x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine
        return turned

    def _split(self, flat: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to [batch, heads, length, head_dim]."""
        return flat.view(*flat.shape[:2], -1, self.head_dim).transpose(1, 2)


def save(head: Eagle3, target: Any, folder: Path) -> None:
    """Write the folder that ``speculators`` would: weights in float16, the embedding left to the target."""
    layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    names = {name: f"layers.0.{name}" for name in layer}
    names |= {name: f"layers.0.self_attn.{name}" for name in attention} | {name: f"layers.0.mlp.{name}" for name in mlp}
    weights = head.state_dict()
    tensors = {
        f"{names.get(module, module)}.weight": weights[f"{module}.weight"].half().contiguous()
        for module in (*layer, *attention, *mlp, "fc", "norm", "lm_head")
    }
    known = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    known[head.vocabulary] = True
    tensors |= {"d2t": head.vocabulary - torch.arange(len(head.vocabulary)), "t2d": known}
    config = target.config
    layer_config = {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": head.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": head.kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": head.theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head.vocabulary),
        "dtype": "float16",
        "eagle_aux_hidden_state_layer_ids": list(FEATURES),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _linear(inner: int, width: int) -> nn.Linear:
    return nn.Linear(inner, width, bias=False)
