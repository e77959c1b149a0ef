"""Who goes to which expert, on the GPU: pairs of a row and an expert, in the order of the experts."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, suffix

ITEM = 32  # pairs of one expert that a block multiplies at a time
_ROWS, _PAIRS = 32, 1024  # that one launch chooses and places, with a warp for each row, or some more
_WARPS = 4
_THREADS, _ROUTE_THREADS = 256, 1024


@dataclass(frozen=True)
class Routes:
    """What the launches ``route`` leave. A pair's number is row * choices + choice.

    ``shares`` [pairs] is what each counts for, ``order`` the pairs by expert, ``places`` where each stands in it,
    ``ends`` where those of each expert end. ``items`` {expert, first place, pairs} are at most ITEM pairs of one expert
    each, ``item_count`` how many there are.
    """

    ids: torch.Tensor
    shares: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    items: torch.Tensor
    item_count: torch.Tensor

    @classmethod
    def of(cls, pairs: int, experts: int, device: torch.device) -> "Routes":
        """Room for ``pairs``."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        shares = torch.empty(pairs, dtype=torch.float32, device=device)
        places = ints(pairs), ints(pairs), ints(experts)
        return cls(ints(pairs), shares, *places, ints(most_items(pairs, experts), 4), ints(1))

    def launches(
        self, module: KernelModule, logits: torch.Tensor, chosen: int, *, normalized: int
    ) -> tuple[Launch, ...]:
        """Choose ``chosen`` of the experts of every row and put the pairs in order."""
        experts, kind = logits.shape[-1], suffix(logits)
        rows = logits.numel() // experts
        sizes = [np.int32(each) for each in (rows, experts, chosen, normalized)]
        placed = (self.order, self.places, self.ends, self.items, self.item_count)
        if rows <= _ROWS and rows * chosen <= _PAIRS:
            few, threads = module.kernel(f"route_few_{kind}"), 32 * max(_WARPS, rows)
            return (Launch(few, (experts, 1, 1), (threads, 1, 1), logits, *sizes, self.shares, *placed),)
        of_rows = ((-(-32 * rows // _THREADS), 1, 1), (_THREADS, 1, 1))  # a warp for each
        pairs = (np.int32(rows * chosen), np.int32(experts))
        return (
            Launch(module.kernel(f"choose_{kind}"), *of_rows, logits, *sizes, self.ids, self.shares),
            Launch(module.kernel(f"place_{kind}"), (experts, 1, 1), (_ROUTE_THREADS, 1, 1), self.ids, *pairs, *placed),
        )


def most_items(pairs: int, experts: int) -> int:
    """At most so many: each expert's last one may be short."""
    return min(experts, pairs) + pairs // ITEM
