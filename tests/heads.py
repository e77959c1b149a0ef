"""Shared by the reference draft heads (tests/eagle3.py, dflash.py, mtp.py): layers in plain torch with random weights.

It shares no code with the exporter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch.nn import functional

Weights = dict[str, torch.Tensor]


class Shape(Protocol):
    """The fields of every head's config.json about its layers."""

    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_length(self) -> int: ...


def layer_config(shape: Shape, family: str) -> dict[str, Any]:
    """The config.json of layers of ``family``, under the names of transformers."""
    return {
        "model_type": family,
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "max_position_embeddings": shape.max_length,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }


def save_head(folder: Path, weights: Weights, config: Mapping[str, object]) -> Path:
    """Write the checkpoint of a head. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Draw:
    """Random weights from a seed. Norms are random too, because norms of 1 hide mistakes."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, width: int, inner: int) -> torch.Tensor:
        return torch.randn(width, inner, generator=self._generator) / inner**0.5

    def norm(self, width: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=self._generator)

    def layer(
        self, name: str, *, hidden: int, heads: int, kv_heads: int, head_dim: int, family: str, inner: int | None = None
    ) -> Weights:
        """A layer of ``family``. Its attention reads ``inner`` numbers, by default ``hidden``."""
        tensors = {}
        for kind, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{name}.self_attn.{kind}_proj.weight"] = self.matrix(count * head_dim, inner or hidden)
        tensors[f"{name}.self_attn.o_proj.weight"] = self.matrix(hidden, heads * head_dim)
        tensors[f"{name}.mlp.gate_proj.weight"] = self.matrix(2 * hidden, hidden)
        tensors[f"{name}.mlp.up_proj.weight"] = self.matrix(2 * hidden, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = self.matrix(hidden, 2 * hidden)
        tensors |= {
            f"{name}.{each}.weight": self.norm(hidden) for each in ("input_layernorm", "post_attention_layernorm")
        }
        if family == "qwen3":
            tensors |= {f"{name}.self_attn.{kind}_norm.weight": self.norm(head_dim) for kind in "qk"}
        return tensors

    def vocabulary(self, vocab: int, known: int) -> Weights:
        """Maps of a reduced draft vocabulary, or none if all tokens are ``known``."""
        if known == vocab:
            return {}
        ids = torch.randperm(vocab, generator=self._generator)[:known].sort().values
        within = torch.zeros(vocab, dtype=torch.bool)
        within[ids] = True
        return {"d2t": ids - torch.arange(known), "t2d": within}


class Layers:
    """Layers in float32 with the cache of one text. ``weights`` have the names of the checkpoint."""

    def __init__(self, weights: Weights, head_dim: int, eps: float = 1e-5) -> None:
        self.weights = weights
        self.cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._head_dim = head_dim
        self._eps = eps

    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` tokens of the cache and drop the rest."""
        self.cache = {name: (key[:, :rows], value[:, :rows]) for name, (key, value) in self.cache.items()}

    @property
    def held(self) -> int:
        """The number of tokens in the cache."""
        return next((key.shape[1] for key, _ in self.cache.values()), 0)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.weights[f"{name}.weight"]

    def write(self, name: str, x: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of ``x`` [tokens, …] to the cache from position ``begin`` on. Return all of it."""
        attention = f"{name}.self_attn"
        key, value = self._heads(x, attention, "k", begin), self._projected(x, attention, "v")
        if name in self.cache:
            key, value = (torch.cat(pair, 1) for pair in zip(self.cache[name], (key, value), strict=True))
        self.cache[name] = key, value
        return key, value

    def block(
        self, name: str, stream: torch.Tensor, normed: torch.Tensor, begin: int, *, causal: bool = True
    ) -> torch.Tensor:
        """Attention of ``normed`` [tokens, …] over earlier tokens, then the MLP. Not ``causal``: and later ones."""
        count, normed = len(normed), self.before(name, "attention", normed)
        key, value = self.write(name, normed, begin)
        query = self._heads(normed, f"{name}.self_attn", "q", begin)
        group = len(query) // len(key)
        scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) / self._head_dim**0.5
        if causal:
            later = torch.arange(key.shape[1])[None] > begin + torch.arange(count)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        mixed = (scores.softmax(-1) @ value.repeat_interleave(group, 0)).transpose(0, 1).reshape(count, -1)
        mixed = mixed @ self.weights[f"{name}.self_attn.o_proj.weight"].T
        stream = stream + self.after(name, "attention", mixed)
        normed = self.before(name, "mlp", self.norm(stream, f"{name}.post_attention_layernorm"))
        return stream + self.after(name, "mlp", self.mlp(f"{name}.mlp", normed))

    def before(self, name: str, sublayer: str, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The input of the sublayer "attention" or "mlp" of layer ``name``, given its normed stream."""
        return x

    def after(self, name: str, sublayer: str, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """What is added to the stream, given the output of the sublayer."""
        return y

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _projected(self, x: torch.Tensor, attention: str, kind: str) -> torch.Tensor:
        projected = x @ self.weights[f"{attention}.{kind}_proj.weight"].T
        if f"{attention}.{kind}_proj.bias" in self.weights:
            projected = projected + self.weights[f"{attention}.{kind}_proj.bias"]
        return projected.view(len(x), -1, self._head_dim).transpose(0, 1)

    def _heads(self, x: torch.Tensor, attention: str, kind: str, begin: int) -> torch.Tensor:
        """Queries or keys after norm and rotation, [heads, tokens, head_dim]."""
        heads, dim = self._projected(x, attention, kind), self._head_dim
        if f"{attention}.{kind}_norm.weight" in self.weights:
            heads = self.norm(heads, f"{attention}.{kind}_norm")
        angles = (begin + torch.arange(len(x)))[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return heads * cosine + torch.cat([-heads[..., dim // 2 :], heads[..., : dim // 2]], -1) * sine
