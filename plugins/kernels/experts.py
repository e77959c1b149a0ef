"""``experts`` on a GPU: route, gate and up with activation, down, and sum per token.

Many rows go through torch's grouped matmuls (plugins/kernels/experts_grouped.py). For batch invariance the rows of
prompts do, and no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_activation import activation_of
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, fill_groups, has_groups
from tandemrt.plugins.kernels.experts_route import ITEM, Routes, Routing, max_items
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.kernels.prompt_rows import CallInParts, split_rows
from tandemrt.plugins.kernels.tensors import check
from tandemrt.plugins.operators.constants import HIDDEN_MULTIPLE, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, WIDTH_MULTIPLE
from tandemrt.plugins.operators.launch import Call, Context

_OUTPUTS = 32  # of one work unit of the down matmul
_THREADS, _AT_ONCE = 256, 2  # threads per block; blocks per SM
_RING = 4 * 4 * _THREADS * 16  # bytes of shared memory for the weight pipeline of a block
_PARTIAL_SUMS = 2 * 8 * ITEM * 17 * 4  # further bytes of it
_LEAST = 1024  # pairs that the workspace always has room for
# Of the kernel that keeps an item's rows in shared memory: the most bytes of these, of what the hidden size must be a
# multiple, and the pairs per expert, if routing is uniform, above which it is faster.
_MOST_KEPT, _KEPT_MULTIPLE, _KEPT_PAIRS = 1 << 17, 512, 3


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """Bind the operator. The number of rows alone selects the implementation of the matmuls.

    For batch invariance, whether rows are those of prompts selects it. Raises ValueError for sizes that the kernels do
    not support.
    """
    routing = Routing.of(tensors["router_logits"], attributes)
    _require_sizes(tensors, routing)
    if not tensors["x"].numel():
        return EmptyCall()
    grouped = has_groups(tensors["x"], context)
    if not context.batch_invariant:
        kind = GroupedMixture if grouped and fill_groups(routing) else ExpertsCall
        return kind(tensors, attributes, context)
    windows, prompts = split_rows(tensors, ("x", "router_logits", "mixed"))
    calls: list[Call] = [] if windows is None else [ExpertsCall(windows, attributes, context)]
    if prompts is not None:
        calls.append((GroupedMixture if grouped else ExpertsCall)(prompts, attributes, context))
    return CallInParts(calls)


class EmptyCall:
    """A bound call without rows."""

    def run(self) -> None:
        """Enqueue nothing."""


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of experts of ``width`` values, as the kernels of ``file`` take them: tensors and numbers.

    ``kind`` precedes the dtype in the names of these kernels. ``gates``: of one work unit of the gate matmul.
    """

    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]
    width: int
    file: str = "experts"
    kind: str = ""
    gates: int = 8


class ExpertsCall:
    """One bound call; contiguous tensors as in the schema. ``weights``: those in ``tensors`` if None.

    Capturable: a run allocates nothing and reads nothing on the host. A row's result does not depend on the other rows.
    """

    def __init__(
        self, tensors: Tensors, attributes: Mapping[str, Any], context: Context, weights: ExpertWeights | None = None
    ) -> None:
        x, logits, mixed = (tensors[name] for name in ("x", "router_logits", "mixed"))
        if weights is None:
            weights = ExpertWeights((tensors["gate_up"],), (tensors["down"],), tensors["down"].shape[-1])
        hidden, width, chosen = x.shape[-1], weights.width, Routing.of(logits, attributes)
        pairs, experts, module, kind = chosen.pairs, chosen.experts, KernelModule.of(context, "experts"), suffix(x)
        matmuls = KernelModule.of(context, weights.file)
        room = max(_LEAST, 1 << (pairs - 1).bit_length())
        routes = context.get_or_create(("routes", room, experts), lambda: Routes.of(room, experts, x.device))
        activated, parts = context.get_or_create(
            ("experts", room, width, hidden, x.dtype),  # calls of an engine run one after another and share it
            lambda: (x.new_empty(room, width), torch.empty(room, hidden, dtype=torch.float32, device=x.device)),
        )
        sizes, per_token = (np.int32(hidden), np.int32(width)), np.int32(chosen.choices)
        routing = (routes.order, routes.items, routes.item_count)
        shares = routes.routing_weights

        keeps = weights.file == "experts" and _keeps_rows(module, x, chosen)

        def out(name: str, across: int, *arguments: Any, kept: int = 0) -> Launch:
            """Bind a persistent launch: as many blocks as run at a time, at most one per work unit.

            ``kept``: bytes of rows that a block keeps in shared memory.
            """
            blocks = min(across * max_items(pairs, experts), (1 if kept else _AT_ONCE) * module.sm_count)
            kernel = matmuls.kernel(f"{name}{weights.kind}_{kind}", shared=_RING + kept)
            return Launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), *arguments, shared=_RING + kept, early=early)

        across, early = -(-hidden // (4 * _THREADS)), module.architecture >= HOPPER
        summed = (parts, per_token, sizes[0], mixed)
        self._device = x.device
        self._launches = (
            *routes.launches(module, logits, chosen, tensors.get("expert_factors")),
            out(
                "gate_up_resident" if keeps else "gate_up",
                width // weights.gates,
                x,
                *weights.gate_up,
                *routing,
                *sizes,
                per_token,
                *activation_of(tensors, attributes),
                activated,
                kept=ITEM * hidden * x.element_size() if keeps else 0,
            ),
            out(
                "down",
                -(-hidden // _OUTPUTS),
                activated,
                *weights.down,
                *routing,
                shares,
                *sizes,
                tensors.get("down_bias"),
                parts,
            ),
            Launch(module.kernel(f"sum_{kind}"), (chosen.rows, across, 1), (_THREADS, 1, 1), *summed, early=early),
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


def _keeps_rows(module: KernelModule, x: torch.Tensor, routing: Routing) -> bool:
    """Return whether the kernel of gate and up keeps the rows of an item, which changes no bit."""
    hidden, size = x.shape[-1], x.element_size()
    fits = size == 2 and hidden % _KEPT_MULTIPLE == 0 and ITEM * hidden * size <= _MOST_KEPT
    many = routing.pairs > _KEPT_PAIRS * routing.experts
    return fits and many and module.shared_memory >= _RING + _MOST_KEPT + _PARTIAL_SUMS


def _require_sizes(tensors: Tensors, routing: Routing) -> None:
    x, gate_up, down, mixed = (tensors[name] for name in ("x", "gate_up", "down", "mixed"))
    hidden, width, experts = x.shape[-1], down.shape[-1], routing.experts
    if gate_up.shape != (2 * experts * width, hidden) or down.shape != (experts * hidden, width):
        raise ValueError(
            f"gate_up, down: {[2 * experts * width, hidden]} and {[experts * hidden, width]} are needed for {experts} "
            f"experts, got {list(gate_up.shape)} and {list(down.shape)}"
        )
    require_counts(hidden, width, routing, (HIDDEN_MULTIPLE, WIDTH_MULTIPLE))
    require_of_experts(tensors, hidden, width, routing)
    if {each.dtype for each in (gate_up, down, mixed, tensors["router_logits"])} != {x.dtype} or mixed.shape != x.shape:
        raise ValueError(f"mixed: {x.dtype}{list(x.shape)} is needed as x is, got {mixed.dtype}{list(mixed.shape)}")


def require_of_experts(tensors: Tensors, hidden: int, width: int, routing: Routing) -> None:
    """Raise ValueError unless the biases and factors among ``tensors`` fit experts of ``width`` values."""
    dtype, experts = tensors["x"].dtype, routing.experts
    sizes = {"gate_up_bias": 2 * experts * width, "down_bias": experts * hidden, "expert_factors": routing.routed}
    for name, size in sizes.items():
        if name in tensors:
            check(name, tensors[name], dtype, (size,))


def require_counts(hidden: int, width: int, routing: Routing, multiples: tuple[int, int]) -> None:
    """Raise ValueError unless the kernels support these sizes, in ``multiples`` of hidden size and width."""
    experts, chosen = routing.routed, routing.per_token
    too_many = experts > MAX_EXPERTS or not 0 < chosen <= min(experts, MAX_EXPERTS_PER_TOKEN)
    if hidden % multiples[0] or width % multiples[1] or too_many:
        raise ValueError(
            f"experts: a hidden size in multiples of {multiples[0]}, a width in multiples of {multiples[1]} and "
            f"at most {MAX_EXPERTS_PER_TOKEN} of {MAX_EXPERTS} experts are needed, got {hidden}, {width} and "
            f"{chosen} of {experts}"
        )
