"""``experts`` for many rows on the GPU: torch's grouped products over rows that are put in the order of their experts.

They are the faster ones from some 16 rows of an expert on, in bfloat16 on the GPUs that torch has a kernel for. On any
other it reads on the host where groups end, and no graph can be captured.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_route import Routes
from tandemrt.plugins.kernels.module import HOPPER, Launch, current_stream, suffix
from tandemrt.plugins.kernels.swiglu import SwigluLauncher
from tandemrt.plugins.launch import Context, Tensors

_FROM = 16  # pairs of an expert, if all are chosen alike
_THREADS, _STEP = 256, 8  # of a block; what sizes must be a multiple of
WITH_KERNELS = (9, 10)  # major numbers of the compute capabilities for which torch._grouped_mm has a kernel


def fits_groups(tensors: Tensors, chosen: int, context: Context) -> bool:
    """Whether there are rows enough, and products for them."""
    x, experts = tensors["x"], tensors["router_logits"].shape[-1]
    many = x.numel() // x.shape[-1] * chosen >= _FROM * experts
    return (
        many
        and x.dtype == torch.bfloat16
        and context.module("experts").architecture >= HOPPER
        and torch.cuda.get_device_capability(x.device)[0] in WITH_KERNELS
    )


class GroupedMixture:
    """One call, bound. Its products have no place to write to but what torch's allocator gives them: capturable, as a
    graph keeps memory of its own."""

    def __init__(self, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> None:
        x, logits, gate_up, down, mixed = (tensors[name] for name in ("x", "router_logits", "gate_up", "down", "mixed"))
        hidden, width, experts, chosen = x.shape[-1], down.shape[-1], logits.shape[-1], attributes["per_token"]
        rows = logits.numel() // experts
        self._module, kind, pairs = context.module("experts"), suffix(x), rows * chosen
        room = 1 << (pairs - 1).bit_length()
        routes = context.keep(("routes", room, experts), lambda: Routes.of(room, experts, x.device))
        gathered, activated = context.keep(
            ("experts in groups", room, width, hidden), lambda: (x.new_empty(room, hidden), x.new_empty(room, width))
        )
        self._route = routes.launches(self._module, logits, chosen, normalized=attributes["normalized"])
        self._gather = Launch(
            *(self._module.kernel(f"gather_{kind}"), (pairs, 1, 1), (_THREADS, 1, 1)),
            *(x, routes.order, np.int32(hidden // _STEP), np.int32(chosen), gathered),
        )
        self._swiglu = context.module("swiglu")
        self._device, self._ends = x.device, routes.ends
        self._gathered, self._activated = gathered[:pairs], activated[:pairs]
        self._gate_up = gate_up.view(experts, 2 * width, hidden).transpose(1, 2)
        self._down = down.view(experts, hidden, width).transpose(1, 2)
        across = -(-hidden // (2 * _THREADS))
        self._sum = (self._module.kernel(f"sum_places_{kind}"), (rows, across, 1), (_THREADS, 1, 1))
        self._summed = (routes.places, routes.shares, np.int32(chosen), np.int32(hidden), mixed)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        stream = current_stream(self._device)
        for each in (*self._route, self._gather):
            each.run(stream)
        both = torch._grouped_mm(self._gathered, self._gate_up, offs=self._ends)
        SwigluLauncher(self._swiglu, both, self._activated).run()
        given = torch._grouped_mm(self._activated, self._down, offs=self._ends)
        Launch(*self._sum, given, *self._summed).run(stream)
