"""Tensors that the windows and the prompts of one ``window_attention`` call share on a GPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerTensors:
    """Validated tensors of a layer: its caches, rotary tables and, if it has them, norm weights and sinks."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def in_float8(self) -> bool:
        return self.key_cache.dtype == torch.float8_e4m3fn

    @property
    def kernels(self) -> str:
        """The kernel file for these caches."""
        return "attention_float8" if self.in_float8 else "attention"

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache

    def inputs(self, first: torch.Tensor, *place: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that a kernel reads, in its order: ``first``, caches, ``place`` of the tokens, angles,
        norms, sinks."""
        return (first, *self.caches, *place, self.cosine, self.sine, self.q_norm, self.k_norm, self.sinks)
