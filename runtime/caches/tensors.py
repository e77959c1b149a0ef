"""The tensors of a decoder's cache."""

from tandemrt.engines.contract import Contract
from tandemrt.plugins.tensors import torch


def cache_tensors(contract: Contract, sizes: dict[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate what ``contract`` changes in place, zeroed, by its names; ``sizes`` of its symbols."""
    return {
        source: torch.zeros(
            contract[source].resolve(sizes), dtype=getattr(torch, contract[source].dtype), device=device
        )
        for _, source in contract.aliases
    }
