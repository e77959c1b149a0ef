"""What the layers of heads share: products, rotary embedding, and weights to begin with."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Module):
    """A gated MLP of ``width``, which begins with those parts of the target's layer ``like`` that write the most."""

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
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def fusion(features: int, hidden: int) -> nn.Linear:
    """What makes a state of ``features`` states: it begins as the last one of them."""
    found = linear(features * hidden, hidden)
    with torch.no_grad():
        found.weight.zero_()
        found.weight[:, -hidden:] = torch.eye(hidden)
    return found


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
