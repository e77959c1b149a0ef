"""Layers of draft heads: projections, attention, rotary embedding and MLPs, initialized from a target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries, keys and values to what is mixed of values, all [batch, heads, length, head_dim]."""


class Attention(nn.Module):
    """The projections of attention with the head_dim and rotary embedding of a target's ``config``.

    It reads ``inner`` values of a token. It has ``heads`` heads, grouped as those of the target, and Qwen3's norms of
    queries and keys if ``normed``.
    """

    def __init__(self, config: Any, inner: int, heads: int, *, normed: bool) -> None:
        super().__init__()
        hidden, self.head_dim, self.theta = config.hidden_size, config.head_dim, config.rope_parameters["rope_theta"]
        kv_heads = heads * config.num_key_value_heads // config.num_attention_heads
        self.group = heads // kv_heads
        self.q_proj, self.o_proj = linear(inner, heads * self.head_dim), linear(heads * self.head_dim, hidden)
        self.k_proj, self.v_proj = (linear(inner, kv_heads * self.head_dim) for _ in range(2))
        if normed:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2))
        self.normed = normed

    def queries(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, head_dim] of ``x`` [batch, length, inner] at ``places``, see ``rotated``."""
        query = split(self.q_proj(x), self.head_dim)
        return rotated(self.q_norm(query) if self.normed else query, places, self.theta)

    def keys_and_values(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``queries``, expanded to all heads."""
        key, value = (split(each(x), self.head_dim) for each in (self.k_proj, self.v_proj))
        key = rotated(self.k_norm(key) if self.normed else key, places, self.theta)
        return key.repeat_interleave(self.group, 1), value.repeat_interleave(self.group, 1)

    def forward(self, x: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[batch, length, hidden]."""
        mixed = attend(self.queries(x, places), *self.keys_and_values(x, places))
        projected: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    """A gated MLP of ``width``, initialized from the parts of the target's layer ``like`` with the largest outputs."""

    def __init__(self, like: Any, width: int) -> None:
        super().__init__()
        hidden = like.mlp.down_proj.weight.shape[0]
        self.gate_proj, self.up_proj = (linear(hidden, width) for _ in range(2))
        self.down_proj = linear(width, hidden)
        with torch.no_grad():
            chosen = like.mlp.down_proj.weight.norm(dim=0).topk(width).indices
            self.gate_proj.weight.copy_(like.mlp.gate_proj.weight[chosen])
            self.up_proj.weight.copy_(like.mlp.up_proj.weight[chosen])
            self.down_proj.weight.copy_(like.mlp.down_proj.weight[:, chosen])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """A decoder layer whose attention reads ``inner`` values; its MLP starts as that of the layer ``like``."""

    def __init__(self, config: Any, like: Any, *, inner: int, heads: int, width: int, normed: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config, inner, heads, normed=normed)
        self.mlp = Mlp(like, width)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(2)
        )
        with torch.no_grad():
            self.post_attention_layernorm.weight.copy_(like.post_attention_layernorm.weight)

    def forward(self, stream: torch.Tensor, read: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Add the attention over ``read`` and the MLP to the residual ``stream`` [batch, length, hidden]."""
        stream = stream + self.self_attn(read, places, attend)
        output: torch.Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output


def masked(mask: torch.Tensor) -> Attend:
    """Attention where ``mask`` [batch, 1, queries, keys] is true."""
    return lambda query, key, value: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def fusion(features: int, hidden: int) -> nn.Linear:
    """Return a projection of ``features`` states to one, initialized to the last of them."""
    projection = linear(features * hidden, hidden)
    with torch.no_grad():
        projection.weight.zero_()
        projection.weight[:, -hidden:] = torch.eye(hidden)
    return projection


def last_norm(target: Any) -> nn.RMSNorm:
    """Return a norm, initialized from the target's last one."""
    norm = nn.RMSNorm(target.config.hidden_size, eps=target.config.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(target.model.norm.weight)
    return norm


def reduced_head(target: Any, vocabulary: torch.Tensor) -> nn.Linear:
    """Return an lm_head for the tokens ``vocabulary`` (ids of the target), initialized from the target's."""
    head = linear(target.config.hidden_size, len(vocabulary))
    with torch.no_grad():
        head.weight.copy_(target.lm_head.weight[vocabulary])
    return head


def linear(inner: int, width: int) -> nn.Linear:
    return nn.Linear(inner, width, bias=False)


def split(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, length, width] to [batch, heads, length, head_dim]."""
    return flat.view(*flat.shape[:2], -1, head_dim).transpose(1, 2)


def rotated(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """``x`` [batch, heads, length, head_dim], rotated to ``places`` [length] or [batch, length]."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, device=x.device).float() / half)
    angles = places[..., None, :, None] * frequencies
    cosine, sine = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine
