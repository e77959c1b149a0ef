"""Measure how often a draft made of a model's first layer agrees with the model, and tune the model's scale to it.

Model and draft share the embedding, the first layer and the lm_head. The contributions of the model's later layers to
the residual stream are multiplied by ``scale``: at 0 the two always agree, and a larger scale lowers the agreement.
Under the coupled rule both sample with the same noise, and a draft is accepted if both samples are the same token.

The weights are random and treat all positions alike, so the forward pass leaves out rotary embedding: it changes the
samples, not the rate of agreement.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

Weights = dict[str, torch.Tensor]
_SEQUENCES, _LENGTH, _SCORED = 8, 96, 64


@dataclass(frozen=True)
class Shape:
    """Sizes that the forward pass needs in addition to the weights."""

    layers: int
    heads: int
    kv_heads: int
    epsilon: float


@dataclass(frozen=True)
class Agreement:
    """``same``: share of equal samples. ``length``: the mean number of tokens per round that follows from it."""

    scale: float
    same: float
    length: float


def measure(weights: Weights, shape: Shape, *, scales: list[float], temperature: float, window: int) -> list[Agreement]:
    """Return the agreement at each scale, over 512 random contexts and the same noise."""
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)  # not stored if it is tied to the embedding
    device, vocab = head.device, head.shape[0]
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, vocab, (_SEQUENCES, _LENGTH), generator=generator, device=device)
    noise = torch.rand(_SEQUENCES * _SCORED, vocab, generator=generator, device=device).clamp_(1e-7)
    noise = noise.log_().neg_().clamp_(1e-7).log_().neg_()

    def drawn(hidden: torch.Tensor) -> torch.Tensor:
        picked = _norm(hidden[:, -_SCORED:], weights["model.norm.weight"], shape).flatten(0, 1)
        logits = (picked @ head.T).float()
        return (logits / temperature + noise).argmax(-1).cpu()

    first = _layer(functional.embedding(tokens, embedding), weights, shape, 0, 1.0)
    draft = drawn(first)
    agreements = []
    for scale in scales:
        hidden = first
        for layer in range(1, shape.layers):
            hidden = _layer(hidden, weights, shape, layer, scale)
        same = float((drawn(hidden) == draft).float().mean())
        agreements.append(Agreement(scale, same, sum(same**i for i in range(window + 1))))
    return agreements


def tune(weights: Weights, shape: Shape, *, length: float, temperature: float, window: int) -> Iterator[Agreement]:
    """Yield the agreements of a bisection over scales; the last one is the closest to ``length`` tokens a round.

    Raises ValueError for a length that no scale reaches.
    """
    if not 1 < length <= window + 1:
        raise ValueError(f"length: must be above 1 and at most window + 1 = {window + 1}, got {length}")
    low, high = math.log(1e-4), math.log(1e2)
    tried: list[Agreement] = []
    for _ in range(11):
        middle = (low + high) / 2
        tried += measure(weights, shape, scales=[math.exp(middle)], temperature=temperature, window=window)
        yield tried[-1]
        low, high = (middle, high) if tried[-1].length > length else (low, middle)
    yield min(tried, key=lambda t: abs(t.length - length))


def _layer(hidden: torch.Tensor, weights: Weights, shape: Shape, layer: int, scale: float) -> torch.Tensor:
    def weight(name: str) -> torch.Tensor:
        return weights[f"model.layers.{layer}.{name}.weight"]

    def heads(name: str, count: int) -> torch.Tensor:
        packed = normed @ weight(f"self_attn.{name}_proj").T
        return packed.view(*packed.shape[:2], count, -1).transpose(1, 2)

    normed = _norm(hidden, weight("input_layernorm"), shape)
    q, k, v = heads("q", shape.heads), heads("k", shape.kv_heads), heads("v", shape.kv_heads)
    group = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    hidden = hidden + scale * (mixed @ weight("self_attn.o_proj").T)
    normed = _norm(hidden, weight("post_attention_layernorm"), shape)
    gated = functional.silu(normed @ weight("mlp.gate_proj").T) * (normed @ weight("mlp.up_proj").T)
    return hidden + scale * (gated @ weight("mlp.down_proj").T)


def _norm(hidden: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, shape.epsilon)
