"""Routing of ``experts`` on a GPU: pairs of a row and an expert, sorted by expert."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, suffix

ITEM = 32  # pairs of one expert that a block multiplies at a time
_ROWS, _PAIRS = 32, 1024  # rows and pairs that one launch routes, with at least one warp per row
_WARPS = 4
_THREADS, _ROUTE_THREADS = 256, 1024


@dataclass(frozen=True)
class Routes:
    """Routing results: pairs (row, choice), numbered row * choices + choice, sorted by expert.

    ``routing_weights`` [pairs] are the weights of the pairs, ``order`` the pairs by expert, ``places`` the position of
    each pair in that order, ``ends`` the end of each expert's pairs. ``items`` {expert, first place, pairs}
    cover at most ITEM pairs of one expert each; ``item_count`` is their number.
    """

    ids: torch.Tensor
    routing_weights: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    items: torch.Tensor
    item_count: torch.Tensor

    @classmethod
    def of(cls, pairs: int, experts: int, device: torch.device) -> "Routes":
        """Allocate room for ``pairs``."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        routing_weights = torch.empty(pairs, dtype=torch.float32, device=device)
        places = ints(pairs), ints(pairs), ints(experts)
        return cls(ints(pairs), routing_weights, *places, ints(max_items(pairs, experts), 4), ints(1))

    def launches(
        self, module: KernelModule, logits: torch.Tensor, chosen: int, *, normalized: int, factors: torch.Tensor | None
    ) -> tuple[Launch, ...]:
        """Bind the launches that choose ``chosen`` experts for every row and sort the pairs."""
        experts, kind = logits.shape[-1], suffix(logits)
        rows = logits.numel() // experts
        sizes = [np.int32(each) for each in (rows, experts, chosen, normalized)]
        placed = (self.order, self.places, self.ends, self.items, self.item_count)
        if rows <= _ROWS and rows * chosen <= _PAIRS:
            few, threads = module.kernel(f"route_few_{kind}"), 32 * max(_WARPS, rows)
            outputs = (self.routing_weights, *placed)
            return (Launch(few, (experts, 1, 1), (threads, 1, 1), logits, *sizes, factors, *outputs),)
        of_rows = ((-(-32 * rows // _THREADS), 1, 1), (_THREADS, 1, 1))  # a warp per row
        pairs = (np.int32(rows * chosen), np.int32(experts))
        return (
            Launch(module.kernel(f"choose_{kind}"), *of_rows, logits, *sizes, factors, self.ids, self.routing_weights),
            Launch(module.kernel(f"place_{kind}"), (experts, 1, 1), (_ROUTE_THREADS, 1, 1), self.ids, *pairs, *placed),
        )


def max_items(pairs: int, experts: int) -> int:
    """Return the largest number of items: the last item of each expert may be short."""
    return min(experts, pairs) + pairs // ITEM
