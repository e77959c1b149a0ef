"""``experts`` for many rows on a GPU: torch's grouped matmuls over rows sorted by expert.

They are faster where most experts have many rows, in bfloat16, on GPUs for which torch has a kernel. On other GPUs
torch reads the group ends on the host, which cannot be captured in a CUDA graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_activation import activation_of, is_swiglu
from tandemrt.plugins.kernels.experts_route import Routes, Routing
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.kernels.swiglu import SwigluLauncher
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_THREADS, _STEP = 256, 8  # threads of a block; sizes must be a multiple of the step
WITH_KERNELS = (9, 10)  # major compute capabilities for which torch._grouped_mm has a kernel


def fill_groups(routing: Routing, item: int) -> bool:
    """Return whether there are enough rows for grouped matmuls to be faster.

    Others read the weights of an expert again after every ``item`` of its pairs.
    """
    return routing.rows * routing.per_token >= item * routing.routed


def has_groups(x: torch.Tensor, context: Context) -> bool:
    """Return whether torch has a kernel for grouped matmuls of ``x``'s dtype on the context's device."""
    return (
        x.dtype == torch.bfloat16
        and KernelModule.of(context, "experts").architecture >= HOPPER
        and device_of(x.device).capability[0] in WITH_KERNELS
    )


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [rows of all experts, inner] in the dtype of the matmuls; ``make``, if there is one, writes it first."""

    values: torch.Tensor
    make: Launch | None = None


class GroupedMixture:
    """One bound call. ``weights``: of gates and ups, and of downs; those in ``tensors`` if None.

    Its matmuls allocate their outputs. It is capturable because torch's allocator reserves such memory for the graph.
    """

    def __init__(
        self,
        tensors: Tensors,
        attributes: Mapping[str, Any],
        context: Context,
        weights: tuple[GroupedWeight, GroupedWeight] | None = None,
    ) -> None:
        x, logits, mixed = (tensors[name] for name in ("x", "router_logits", "mixed"))
        gate_up, down = weights or (GroupedWeight(tensors["gate_up"]), GroupedWeight(tensors["down"]))
        hidden, width, routing = x.shape[-1], down.values.shape[-1], Routing.of(logits, attributes)
        rows, experts, pairs, choices = routing.rows, routing.experts, routing.pairs, np.int32(routing.choices)
        self._module, kind = KernelModule.of(context, "experts"), suffix(x)
        room = 1 << (pairs - 1).bit_length()
        routes = Routes.of(context, room, experts)
        gathered, activated = context.get_or_create(
            ("experts in groups", room, width, hidden), lambda: (x.new_empty(room, hidden), x.new_empty(room, width))
        )
        self._route = routes.launches(self._module, logits, routing, tensors.get("expert_factors"))
        self._gather = Launch(
            self._module.kernel(f"gather_{kind}"),
            (rows, 1, 1),
            (_THREADS, 1, 1),
            x,
            routes.places,
            np.int32(hidden // _STEP),
            choices,
            gathered,
        )
        self._swiglu = KernelModule.of(context, "swiglu") if is_swiglu(tensors, attributes) else None
        self._activate = (self._module.kernel(f"activate_{kind}"), (pairs, 1, 1), (_THREADS, 1, 1))
        placed = (routes.ends, np.int32(experts))
        self._activation = (*placed, np.int32(width), *activation_of(tensors, attributes), activated)
        self._device, self._ends = x.device, routes.ends
        self._gathered, self._activated = gathered[:pairs], activated[:pairs]
        self._gate_up = gate_up.values.view(experts, 2 * width, hidden).transpose(1, 2)
        self._down = down.values.view(experts, hidden, width).transpose(1, 2)
        self._make_gate_up, self._make_down = gate_up.make, down.make
        self._sum = routes.sum(self._module, routing, tensors.get("down_bias"), mixed)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        stream = current_stream(self._device)
        for each in (*self._route, self._gather):
            each.run(stream)
        if self._make_gate_up is not None:
            self._make_gate_up.run(stream)
        both = torch._grouped_mm(self._gathered, self._gate_up, offs=self._ends)
        if self._swiglu is not None:
            SwigluLauncher(self._swiglu, both, self._activated).run()
        else:
            Launch(*self._activate, both, *self._activation).run(stream)
        if self._make_down is not None:
            self._make_down.run(stream)
        expert_outputs = torch._grouped_mm(self._activated, self._down, offs=self._ends)
        self._sum(expert_outputs).run(stream)
