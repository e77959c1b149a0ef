"""``experts`` in 16 bits on a GPU: warps that add the inputs of 16 outputs in order (experts_ordered.cuh)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_activation import activation_of
from tandemrt.plugins.kernels.experts_route import ITEM, Routes, Routing
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.operators.launch import Context

Depths = tuple[tuple[int, int], ...]

_WARPS, _TILE, _CHUNK = 8, 8, 64
# Warps of a block, and chunks of its weights that a warp copies ahead, and one: the first that fit are used.
STAGES = (6, 4, 2)
DEPTHS = tuple((_WARPS, stages) for stages in STAGES)
WIDE = ((2 * _WARPS, 6), (2 * _WARPS, 4), *DEPTHS)
_FEW = 16  # rows whose down matmul has more warps


class OrderedMixture:
    """One bound call; contiguous tensors as in the schema.

    Capturable: a run allocates nothing and reads nothing on the host. A row's result does not depend on the other rows.
    ``rows_of_an_item`` of the larger of hidden size and width must not be 0.
    """

    def __init__(self, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> None:
        x, logits, mixed, down = (tensors[name] for name in ("x", "router_logits", "mixed", "down"))
        hidden, width, routing = x.shape[-1], down.shape[-1], Routing.of(logits, attributes)
        module, pairs = KernelModule.of(context, "experts"), 1 << (routing.pairs - 1).bit_length()
        item = rows_of_an_item(max(hidden, width), module.shared_memory)
        routes = Routes.of(context, pairs, routing.experts, item)
        activated, outputs = context.get_or_create(
            ("experts in order", pairs, width, hidden, x.dtype),
            lambda: (x.new_empty(pairs, width), x.new_empty(pairs, hidden)),
        )
        room = min(item, -(-routing.rows // _TILE) * _TILE)
        units = min(routing.experts, routing.pairs) * width / 8 / module.sm_count  # of 8 gates, of a block
        gates = WIDE if _WARPS < units <= 2 * _WARPS else DEPTHS
        downs = WIDE if routing.rows <= _FEW else DEPTHS
        early, sizes = module.architecture >= HOPPER, (np.int32(hidden), np.int32(width))

        def matmul(name: str, depths: Depths, rows: torch.Tensor, weight: torch.Tensor, *more: Any) -> Launch:
            """Bind a persistent launch with a block per SM, which fills it."""
            inner = rows.shape[-1]
            fitting = (each for each in depths if shared_bytes(room, inner, *each) <= module.shared_memory)
            warps, stages = next(fitting)
            shared = shared_bytes(room, inner, warps, stages)
            kernel, blocks = module.kernel(f"{name}_{suffix(x)}", shared=shared), (module.sm_count, 1, 1)
            items = (routes.items, routes.item_count)
            arguments = (rows, weight, *items, np.int32(room), np.int32(stages), *sizes, *more)
            return Launch(kernel, blocks, (32 * warps, 1, 1), *arguments, shared=shared, early=early)

        biased = (*activation_of(tensors, attributes), activated)
        self._device = x.device
        self._launches = (
            *routes.launches(module, logits, routing, tensors.get("expert_factors")),
            matmul("gate_up_ordered", gates, x, tensors["gate_up"], routes.order, np.int32(routing.choices), *biased),
            matmul("down_ordered", downs, activated, down, outputs),
            routes.sum(module, routing, tensors.get("down_bias"), mixed)(outputs),
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


def shared_bytes(room: int, inner: int, warps: int, stages: int) -> int:
    """Return the shared memory of a block that keeps ``room`` rows of ``inner`` values."""
    row = 2 * (-(-inner // _CHUNK) * _CHUNK + 8)
    return warps * stages * 2 * _CHUNK * 16 + room * row


def rows_of_an_item(inner: int, shared_memory: int) -> int:
    """Return the most rows of an item that fit into a block's memory; 0 if not even those of a tile do."""
    for stages in (STAGES[0], STAGES[-1]):
        for item in (ITEM, ITEM // 2, _TILE):
            if shared_bytes(item, inner, _WARPS, stages) <= shared_memory:
                return item
    return 0
