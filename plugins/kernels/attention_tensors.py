"""What the windows and the prompts of one call of ``window_attention`` share on the GPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of a layer, checked: its caches, the angles of every position, and the weights of its norms, if any."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    @property
    def in_float8(self) -> bool:
        return self.key_cache.dtype == torch.float8_e4m3fn

    @property
    def kernels(self) -> str:
        """The file of the kernels for these caches."""
        return "attention_float8" if self.in_float8 else "attention"

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache

    def inputs(self, first: torch.Tensor, *place: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What a kernel reads, in its order: ``first``, caches, the ``place`` of tokens, angles, norms."""
        return (first, *self.caches, *place, self.cosine, self.sine, self.q_norm, self.k_norm)
