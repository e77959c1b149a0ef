"""EAGLE-3 heads with random weights, and what such a head computes, in plain torch from its definition.

Li et al., "EAGLE-3" (arXiv 2503.01840), and the options of the package ``speculators``. The definition shares no code
with the exporter.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Head:
    """The shape of a head and its options, under the names of ``speculators``."""

    vocab: int
    hidden: int
    target_layers: int
    draft_vocab: int
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    features: tuple[int, ...] = (1, 0)
    family: str = "llama"
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    flat: bool = False  # the names of SafeAILab and SpecForge
    max_length: int = 256

    def config(self) -> dict[str, Any]:
        """config.json."""
        layer = {
            "model_type": self.family,
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "max_position_embeddings": self.max_length,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }
        if self.flat:
            ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.features)}}
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, "draft_vocab_size": self.draft_vocab, **ids}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab,
            "eagle_aux_hidden_state_layer_ids": list(self.features),
            "fc_norm": self.fc_norm,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "transformer_layer_config": layer,
        }

    def weights(self, seed: int = 0) -> Weights:
        """Random weights. Norms are random too: at 1 they hide mistakes."""
        draw = torch.Generator().manual_seed(seed)

        def matrix(width: int, inner: int) -> torch.Tensor:
            return torch.randn(width, inner, generator=draw) / inner**0.5

        def norm(width: int) -> torch.Tensor:
            return 1 + 0.3 * torch.randn(width, generator=draw)

        hidden, aux = self.hidden, len(self.features)
        found = {"fc.weight": matrix(hidden, aux * hidden), "norm.weight": norm(hidden)}
        found["lm_head.weight"] = 3 * matrix(self.draft_vocab, hidden)
        if self.own_embedding:
            found["embed_tokens.weight"] = matrix(self.vocab, hidden) * hidden**0.5
        if self.norm_before_fc:
            found["input_norm.weight"] = norm(aux * hidden)
        if self.fc_norm:
            found |= {f"fc_norm.{at}.weight": norm(hidden) for at in range(aux)}
        for layer in range(self.layers):
            name = "midlayer" if self.flat and layer == 0 else f"layers.{layer}"
            inner = 2 * hidden if layer == 0 else hidden
            for kind, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                found[f"{name}.self_attn.{kind}_proj.weight"] = matrix(count * self.head_dim, inner)
            found[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, self.heads * self.head_dim)
            found[f"{name}.mlp.gate_proj.weight"] = matrix(2 * hidden, hidden)
            found[f"{name}.mlp.up_proj.weight"] = matrix(2 * hidden, hidden)
            found[f"{name}.mlp.down_proj.weight"] = matrix(hidden, 2 * hidden)
            norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])]
            found |= {f"{name}.{each}.weight": norm(hidden) for each in norms}
            if self.family == "qwen3":
                found |= {f"{name}.self_attn.{kind}_norm.weight": norm(self.head_dim) for kind in "qk"}
        if self.draft_vocab < self.vocab:
            ids = torch.randperm(self.vocab, generator=draw)[: self.draft_vocab].sort().values
            known = torch.zeros(self.vocab, dtype=torch.bool)
            known[ids] = True
            found |= {"d2t": ids - torch.arange(self.draft_vocab), "t2d": known}
        return found

    def save(self, folder: Path, weights: Weights | None = None, **changes: object) -> Path:
        """Write the checkpoint; ``changes`` replace fields of its config. Returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights() if weights is None else weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config() | changes))
        return folder


class Definition:
    """A head in float32 with a cache of its own, for one text."""

    def __init__(self, head: Head, weights: Weights, embedding: torch.Tensor | None = None) -> None:
        self.head = head
        self.weights = weights
        self.embedding = weights["embed_tokens.weight"] if embedding is None else embedding
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[tokens, features] to [tokens, hidden]."""
        if self.head.norm_before_fc:
            features = self._norm(features, "input_norm")
        if self.head.fc_norm:
            parts = features.split(self.head.hidden, -1)
            features = torch.cat([self._norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)], -1)
        return features @ self.weights["fc.weight"].T

    def keep(self, rows: int) -> None:
        """Drop what the cache holds behind its first ``rows`` pairs."""
        self.cache = [(key[:, :rows], value[:, :rows]) for key, value in self.cache]

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs behind those in the cache: logits [tokens, draft vocabulary] and the states to feed back."""
        head, first = self.head, "midlayer" if self.head.flat else "layers.0"
        begin = self.cache[0][0].shape[1] if self.cache else 0
        normed = self._norm(states, f"{first}.hidden_norm")
        x = torch.cat([self._norm(self.embedding[tokens], f"{first}.input_layernorm"), normed], -1)
        stream = normed if head.norm_before_residual else states
        for layer in range(head.layers):
            name = first if layer == 0 else f"layers.{layer}"
            if layer:
                x = self._norm(stream, f"{name}.input_layernorm")
            stream = stream + self._attention(layer, name, x, begin)
            x = self._norm(stream, f"{name}.post_attention_layernorm")
            gate, up, down = (self.weights[f"{name}.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            stream = stream + (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        last = self._norm(stream, "norm")
        return last @ self.weights["lm_head.weight"].T, last if head.norm_output else stream

    def _attention(self, layer: int, name: str, x: torch.Tensor, begin: int) -> torch.Tensor:
        count, dim = len(x), self.head.head_dim
        query, key, value = (
            (x @ self.weights[f"{name}.self_attn.{kind}_proj.weight"].T).view(count, -1, dim).transpose(0, 1)
            for kind in "qkv"
        )
        if self.head.family == "qwen3":
            query, key = self._norm(query, f"{name}.self_attn.q_norm"), self._norm(key, f"{name}.self_attn.k_norm")
        angles = (begin + torch.arange(count))[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            return y * cosine + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sine

        query, key = rotated(query), rotated(key)
        if layer < len(self.cache):
            key, value = (torch.cat(pair, 1) for pair in zip(self.cache[layer], (key, value), strict=True))
            self.cache[layer] = (key, value)
        else:
            self.cache.append((key, value))
        group = self.head.heads // self.head.kv_heads
        scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) / dim**0.5
        later = torch.arange(key.shape[1])[None] > begin + torch.arange(count)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = (weights @ value.repeat_interleave(group, 0)).transpose(0, 1).reshape(count, -1)
        return mixed @ self.weights[f"{name}.self_attn.o_proj.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]
