"""Allocation of a decoder's cache tensors."""

from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.tensors import torch


def cache_tensors(contract: Contract, sizes: dict[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate zeroed tensors for the inputs that are updated in place, by name. ``sizes``: by symbol."""
    return {
        source: torch.zeros(
            contract[source].resolve(sizes), dtype=getattr(torch, contract[source].dtype), device=device
        )
        for _, source in contract.aliases
    }
