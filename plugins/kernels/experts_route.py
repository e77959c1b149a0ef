"""Routing of ``experts`` on a GPU: pairs of a row and an expert, sorted by expert."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, suffix
from tandemrt.plugins.operators.launch import Context

ITEM = 32  # pairs of one expert that a block multiplies at a time
_ROWS, _PAIRS = 32, 1024  # rows and pairs that one block routes, with a warp per row and a thread per expert
_READABLE = 32  # items that kernels may read before they know how many there are
_THREADS, _ROUTE_THREADS = 256, 1024


@dataclass(frozen=True)
class Routing:
    """How ``rows`` choose: ``per_token`` of ``routed`` experts each, and a shared one if it has columns of logits."""

    rows: int
    routed: int
    per_token: int
    normalized: int
    shared_columns: int

    @classmethod
    def of(cls, logits: torch.Tensor, attributes: Mapping[str, Any]) -> "Routing":
        """Return that of an operator with these ``router_logits`` and attributes."""
        columns, names = logits.shape[-1], ("per_token", "normalized", "shared_columns")
        values = {name: attributes[name] for name in names}
        return cls(logits.numel() // columns, columns - attributes["shared_columns"], **values)

    @property
    def experts(self) -> int:
        """All experts."""
        return self.routed + bool(self.shared_columns)

    @property
    def choices(self) -> int:
        """Experts of a row."""
        return self.per_token + bool(self.shared_columns)

    @property
    def pairs(self) -> int:
        """Pairs of a row and an expert that it chooses."""
        return self.rows * self.choices


@dataclass(frozen=True)
class Routes:
    """Routing results: pairs (row, choice), numbered row * choices + choice, sorted by expert.

    ``routing_weights`` [pairs] are the weights of the pairs, ``order`` the pairs by expert, ``places`` the position of
    each pair in that order, ``ends`` the end of each expert's pairs. ``items`` {expert, first place, pairs}
    cover at most ``item`` pairs of one expert each; ``item_count`` is their number.
    """

    item: int
    ids: torch.Tensor
    routing_weights: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    items: torch.Tensor
    item_count: torch.Tensor

    @classmethod
    def of(cls, context: Context, pairs: int, experts: int, item: int = ITEM) -> "Routes":
        """Return those of ``context``, which its calls share, with room for ``pairs``."""
        key = ("routes", pairs, experts, item)
        return context.get_or_create(key, lambda: cls._allocated(pairs, experts, item, context.device))

    @classmethod
    def _allocated(cls, pairs: int, experts: int, item: int, device: torch.device) -> "Routes":
        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        routing_weights = torch.empty(pairs, dtype=torch.float32, device=device)
        places = ints(pairs), ints(pairs), ints(experts)
        items = ints(max(_READABLE, max_items(pairs, experts, item)), 4)
        return cls(item, ints(pairs), routing_weights, *places, items, ints(1))

    def launches(
        self, module: KernelModule, logits: torch.Tensor, routing: Routing, factors: torch.Tensor | None
    ) -> tuple[Launch, ...]:
        """Bind the launches that choose the experts of every row and sort the pairs."""
        rows, experts, kind, early = routing.rows, routing.experts, suffix(logits), module.architecture >= HOPPER
        of_row = (routing.routed, routing.per_token, routing.normalized, routing.shared_columns)
        sizes = [np.int32(number) for number in (rows, *of_row)]
        placed = (self.order, self.places, self.ends, self.items, self.item_count)
        if rows <= _ROWS and routing.pairs <= _PAIRS:
            few, threads = module.kernel(f"route_few_{kind}"), 32 * max(-(-experts // 32), rows)
            outputs = (np.int32(self.item), self.routing_weights, *placed)
            return (Launch(few, (1, 1, 1), (threads, 1, 1), logits, *sizes, factors, *outputs, early=early),)
        of_rows = ((-(-32 * rows // _THREADS), 1, 1), (_THREADS, 1, 1))  # a warp per row
        pairs = tuple(map(np.int32, (routing.pairs, experts, self.item)))
        choose, place = module.kernel(f"choose_{kind}"), module.kernel(f"place_{kind}")
        of_experts = ((experts, 1, 1), (_ROUTE_THREADS, 1, 1))
        return (
            Launch(choose, *of_rows, logits, *sizes, factors, self.ids, self.routing_weights, early=early),
            Launch(place, *of_experts, self.ids, *pairs, *placed, early=early),
        )

    def sum(
        self,
        module: KernelModule,
        routing: Routing,
        bias: torch.Tensor | None,
        mixed: torch.Tensor,
    ) -> Callable[[torch.Tensor], Launch]:
        """Return what binds the sum of each row's pairs of outputs [places, hidden], which are biased and weighted."""
        hidden, wide = mixed.shape[-1], 16 // mixed.element_size()
        grid = (routing.rows, -(-hidden // (wide * _THREADS)), 1)
        kernel, experts = module.kernel(f"sum_places_{suffix(mixed)}"), np.int32(routing.experts)
        sizes = (np.int32(routing.choices), np.int32(hidden))
        rest = (self.places, self.routing_weights, self.ends, experts, bias, *sizes, mixed)
        early = module.architecture >= HOPPER
        return lambda outputs: Launch(kernel, grid, (_THREADS, 1, 1), outputs, *rest, early=early)


def max_items(pairs: int, experts: int, item: int = ITEM) -> int:
    """Return the largest number of items: the last item of each expert may be short."""
    return min(experts, pairs) + pairs // item
