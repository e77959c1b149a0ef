"""EAGLE-3 and P-EAGLE heads with random weights, and a reference implementation of such a head in plain torch.

Li et al., "EAGLE-3" (arXiv 2503.01840), "P-EAGLE" (arXiv 2602.01469), and the options of the package ``speculators``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.heads import Draw, Layers, Weights, layer_config, save_head

# Widths of latent attention: of the vectors that queries, and keys and values, are made from; of a head's parts.
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 10}


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
    norm_before_head: bool = True  # SpecForge's norm_output
    own_embedding: bool = True
    flat: bool = False  # as SafeAILab and SpecForge write it
    max_length: int = 256
    mask_token: int | None = None  # of P-EAGLE
    latent: Mapping[str, int] | None = None  # widths of latent attention, as LATENT

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        layer = layer_config(self, self.family)
        if self.latent:  # as vLLM reads it
            layer |= {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6, **self.latent}
            norms = {name: getattr(self, name) for name in ("fc_norm", "norm_before_residual", "norm_output")}
            ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.features)}}
            return {
                "architectures": ["Eagle3DeepseekV2ForCausalLM"],
                **layer,
                "draft_vocab_size": self.draft_vocab,
                **ids,
                **norms,
            }
        if self.flat:
            outputs = [layer - 1 for layer in self.features]  # which it names instead of inputs
            ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs}}
            named = "LlamaForCausalLMEagle3" if self.mask_token is None else "PEagleDraftModel"
            own = {} if self.mask_token is None else {"mask_token_id": self.mask_token}
            own |= {"norm_before_residual": True} if self.norm_before_residual else {}
            own |= {} if self.norm_before_head else {"norm_output": False}
            return {"architectures": [named], **layer, "draft_vocab_size": self.draft_vocab, **ids, **own}
        masked = {} if self.mask_token is None else {"mask_token_id": self.mask_token}
        return {
            "architectures": ["PEagleDraftModel" if masked else "Eagle3DraftModel"],
            "speculators_model_type": "peagle" if masked else "eagle3",
            **masked,
            "draft_vocab_size": self.draft_vocab,
            "eagle_aux_hidden_state_layer_ids": list(self.features),
            "fc_norm": self.fc_norm,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "transformer_layer_config": layer,
        }

    @property
    def first(self) -> str:
        """The name of the first layer; SpecForge numbers it in a P-EAGLE head."""
        return "midlayer" if self.flat and self.mask_token is None else "layers.0"

    def weights(self, seed: int = 0) -> Weights:
        """Random weights."""
        draw, hidden, aux = Draw(seed), self.hidden, len(self.features)
        tensors = {"fc.weight": draw.matrix(hidden, aux * hidden), "norm.weight": draw.norm(hidden)}
        tensors["lm_head.weight"] = 3 * draw.matrix(self.draft_vocab, hidden)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = draw.matrix(self.vocab, hidden) * hidden**0.5
        if self.norm_before_fc:
            tensors["input_norm.weight"] = draw.norm(aux * hidden)
        if self.fc_norm:
            tensors |= {f"fc_norm.{at}.weight": draw.norm(hidden) for at in range(aux)}
        if self.mask_token is not None:
            tensors["mask_hidden"] = draw.matrix(1, aux * hidden)[None] * (aux * hidden) ** 0.5
        sizes = {"hidden": hidden, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for layer in range(self.layers):
            name = self.first if layer == 0 else f"layers.{layer}"
            inner = hidden if layer else 2 * hidden
            tensors |= draw.layer(name, **sizes, family=self.family, inner=inner)
            if self.latent:
                tensors |= self._latent(draw, f"{name}.self_attn", inner, *self.latent.values())
                for kind in "qkv":
                    del tensors[f"{name}.self_attn.{kind}_proj.weight"]
            if layer == 0:
                tensors[f"{name}.hidden_norm.weight"] = draw.norm(hidden)
        return tensors | draw.vocabulary(self.vocab, self.draft_vocab)

    def _latent(
        self, draw: Draw, name: str, inner: int, queries: int, rank: int, plain: int, rotated: int, value: int
    ) -> Weights:
        """The weights of latent attention that reads ``inner`` numbers."""
        shapes = {
            "q_a_proj": (queries, inner),
            "q_b_proj": (self.heads * (plain + rotated), queries),
            "kv_a_proj_with_mqa": (rank + rotated, inner),
            "kv_b_proj": (self.heads * (plain + value), rank),
            "o_proj": (self.hidden, self.heads * value),
        }
        norms = {f"{name}.{kind}_a_layernorm.weight": draw.norm(size) for kind, size in (("q", queries), ("kv", rank))}
        return norms | {f"{name}.{module}.weight": draw.matrix(*shape) for module, shape in shapes.items()}

    def save(self, folder: Path, weights: Weights | None = None, **changes: object) -> Path:
        """Write the checkpoint; ``changes`` replace fields of its config. Return the folder."""
        return save_head(folder, self.weights() if weights is None else weights, self.config() | changes)


class Definition(Layers):
    """Reference head in float32 with its own cache, for one text."""

    def __init__(self, head: Head, weights: Weights, embedding: torch.Tensor | None = None) -> None:
        super().__init__(weights, head.head_dim, 1e-6 if head.latent else 1e-5)
        self.head = head
        self.embedding = weights["embed_tokens.weight"] if embedding is None else embedding

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[tokens, features] to [tokens, hidden]."""
        if self.head.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.head.fc_norm:
            parts = features.split(self.head.hidden, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)], -1)
        return features @ self.weights["fc.weight"].T

    def masks(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask tokens and states that P-EAGLE feeds for ``count`` future tokens."""
        assert self.head.mask_token is not None
        state = self.fuse(self.weights["mask_hidden"].reshape(1, -1))
        return torch.full((count,), self.head.mask_token), state.expand(count, -1)

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs after those in the cache; return logits [tokens, draft vocabulary] and the states to feed back."""
        head, first, begin = self.head, self.head.first, self.held
        normed = self.norm(states, f"{first}.hidden_norm")
        x = torch.cat([self.norm(self.embedding[tokens], f"{first}.input_layernorm"), normed], -1)
        stream = normed if head.norm_before_residual else states
        for layer in range(head.layers):
            name = first if layer == 0 else f"layers.{layer}"
            stream = self.block(name, stream, self.norm(stream, f"{name}.input_layernorm") if layer else x, begin)
        last = self.norm(stream, "norm") if head.norm_before_head else stream
        return last @ self.weights["lm_head.weight"].T, last if head.norm_output else stream

    def block(
        self, name: str, stream: torch.Tensor, normed: torch.Tensor, begin: int, *, causal: bool = True
    ) -> torch.Tensor:
        """As Layers.block; latent attention computes keys and values of each head (DeepSeek-V2, section 2.1)."""
        if self.head.latent is None:
            return super().block(name, stream, normed, begin, causal=causal)
        attention, heads, count = f"{name}.self_attn", self.head.heads, len(normed)
        _, rank, plain, rotated, _ = self.head.latent.values()

        def projected(x: torch.Tensor, module: str) -> torch.Tensor:
            return x @ self.weights[f"{attention}.{module}.weight"].T

        query = projected(self.norm(projected(normed, "q_a_proj"), f"{attention}.q_a_layernorm"), "q_b_proj")
        query = query.view(count, heads, -1).transpose(0, 1)
        vector, shared = projected(normed, "kv_a_proj_with_mqa").split([rank, rotated], -1)
        expanded = projected(self.norm(vector, f"{attention}.kv_a_layernorm"), "kv_b_proj")
        key, value = expanded.view(count, heads, -1).transpose(0, 1).tensor_split([plain], -1)
        place = begin + torch.arange(count)
        query = torch.cat([query[..., :plain], _turned(query[..., plain:], place)], -1)
        key = torch.cat([key, _turned(shared, place).expand(heads, -1, -1)], -1)
        if name in self.cache:
            key, value = (torch.cat(pair, 1) for pair in zip(self.cache[name], (key, value), strict=True))
        self.cache[name] = key, value
        earlier = torch.arange(key.shape[1])[None] <= place[:, None]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=earlier)
        stream = stream + projected(mixed.transpose(0, 1).reshape(count, -1), "o_proj")
        return stream + self.mlp(f"{name}.mlp", self.norm(stream, f"{name}.post_attention_layernorm"))


def _turned(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours of ``x`` [..., tokens, dim] by the places of the tokens."""
    dim = x.shape[-1]
    angles = place[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], dim // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
