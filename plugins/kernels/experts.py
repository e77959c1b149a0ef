"""``experts`` on the GPU: who goes where, gate and up with their activation, down, and each token's sum.

For many rows the products are torch's (plugins/kernels/experts_grouped.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, fits_groups
from tandemrt.plugins.kernels.experts_route import Routes, most_items
from tandemrt.plugins.kernels.module import Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context, Tensors
from tandemrt.plugins.operators import HIDDEN_STEP, MOST_EXPERTS, MOST_PER_TOKEN, WIDTH_STEP

_GATES, _OUTPUTS = 8, 32  # gates of a unit, and outputs of one of the last product
_THREADS, _AT_ONCE = 256, 2  # of a block; blocks of a multiprocessor
_RING = 4 * 4 * _THREADS * 16  # bytes of weights that are on their way to a block
_LEAST = 1024  # pairs that there is always room for


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """See plugins/launch.py. Which way the products go depends on the number of rows alone.

    Raises ValueError for sizes that the kernels do not take.
    """
    _require_sizes(tensors, attributes["per_token"])
    if not tensors["x"].numel():
        return Nothing()
    kind = GroupedMixture if fits_groups(tensors, attributes["per_token"], context) else Mixture
    return kind(tensors, attributes, context)


class Nothing:
    """A call without rows."""

    def run(self) -> None:
        """Enqueue nothing."""


class Mixture:
    """One call, bound; tensors as the schema says, contiguous. Capturable: a run allocates nothing and reads nothing on
    the host. A row has the same bits in any company.
    """

    def __init__(self, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> None:
        x, logits, gate_up, down, mixed = (tensors[name] for name in ("x", "router_logits", "gate_up", "down", "mixed"))
        hidden, width, experts, chosen = x.shape[-1], down.shape[-1], logits.shape[-1], attributes["per_token"]
        rows = logits.numel() // experts
        pairs, module, kind = rows * chosen, context.module("experts"), suffix(x)
        room = max(_LEAST, 1 << (pairs - 1).bit_length())
        routes = context.keep(("routes", room, experts), lambda: Routes.of(room, experts, x.device))
        activated, parts = context.keep(
            ("experts", room, width, hidden, x.dtype),  # the calls of an engine follow one another, so they share it
            lambda: (x.new_empty(room, width), torch.empty(room, hidden, dtype=torch.float32, device=x.device)),
        )
        sizes, per_token = (np.int32(hidden), np.int32(width)), np.int32(chosen)
        given = (routes.order, routes.items, routes.item_count)

        def product(name: str, across: int, *arguments: Any) -> Launch:
            """As many blocks as run at a time, or as there can be units."""
            blocks = min(across * most_items(pairs, experts), _AT_ONCE * module.processors)
            kernel = module.kernel(f"{name}_{kind}", shared=_RING)
            return Launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), *arguments, shared=_RING)

        across = -(-hidden // (4 * _THREADS))
        self._device = x.device
        self._launches = (
            *routes.launches(module, logits, chosen, normalized=attributes["normalized"]),
            product("gate_up", width // _GATES, x, gate_up, *given, *sizes, per_token, activated),
            product("down", -(-hidden // _OUTPUTS), activated, down, *given, routes.shares, *sizes, parts),
            Launch(
                *(module.kernel(f"sum_{kind}"), (rows, across, 1), (_THREADS, 1, 1)), parts, per_token, sizes[0], mixed
            ),
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        stream = current_stream(self._device)
        for each in self._launches:
            each.run(stream)


def _require_sizes(tensors: Tensors, chosen: int) -> None:
    x, gate_up, down, mixed = (tensors[name] for name in ("x", "gate_up", "down", "mixed"))
    hidden, width, experts = x.shape[-1], down.shape[-1], tensors["router_logits"].shape[-1]
    if gate_up.shape != (2 * experts * width, hidden) or down.shape != (experts * hidden, width):
        raise ValueError(
            f"gate_up, down: {[2 * experts * width, hidden]} and {[experts * hidden, width]} are needed for {experts} "
            f"experts, got {list(gate_up.shape)} and {list(down.shape)}"
        )
    too_many = experts > MOST_EXPERTS or not 0 < chosen <= min(experts, MOST_PER_TOKEN)
    if hidden % HIDDEN_STEP or width % WIDTH_STEP or too_many:
        raise ValueError(
            f"experts: a hidden size in multiples of {HIDDEN_STEP}, a width in multiples of {WIDTH_STEP} and at most "
            f"{MOST_PER_TOKEN} of {MOST_EXPERTS} experts are needed, got {hidden}, {width} and {chosen} of {experts}"
        )
    if {each.dtype for each in (gate_up, down, mixed, tensors["router_logits"])} != {x.dtype} or mixed.shape != x.shape:
        raise ValueError(f"mixed: {x.dtype}{list(x.shape)} is needed as x is, got {mixed.dtype}{list(mixed.shape)}")
