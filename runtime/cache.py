"""The linear key/value cache: one row per slot, allocated once, updated in place by the engine."""

import torch

from tandemrt.engines.contract import Contract


class LinearCache:
    """Tensors [slots, kv_heads, capacity, head_dim] for every ``past_*`` binding of a decoder contract."""

    def __init__(self, contract: Contract, slots: int, device: torch.device) -> None:
        self.tensors = {
            source: torch.zeros(
                contract[source].resolve({"batch": slots}), dtype=getattr(torch, contract[source].dtype), device=device
            )
            for _, source in contract.aliases
        }

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """The cache of slots [start, start + count), as contiguous views."""
        return {name: tensor[start : start + count] for name, tensor in self.tensors.items()}
