"""``experts`` on a GPU: route, gate and up with activation, down, and sum per token.

Weights in 16 bits are multiplied in order (plugins/kernels/experts_ordered.py); they are streamed if rows do not fit
into shared memory, or are few without batch invariance. Many rows go through torch's grouped matmuls
(plugins/kernels/experts_grouped.py). For batch invariance these must give the same bits; otherwise the rows of prompts
go through them, and no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts_activation import activation_of
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, fill_groups, has_groups
from tandemrt.plugins.kernels.experts_ordered import OrderedMixture, rows_of_an_item
from tandemrt.plugins.kernels.experts_route import ITEM, Routes, Routing, max_items
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.kernels.prompt_rows import CallInParts, split_rows
from tandemrt.plugins.kernels.tensors import check
from tandemrt.plugins.operators.constants import HIDDEN_MULTIPLE, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, WIDTH_MULTIPLE
from tandemrt.plugins.operators.launch import Call, Context

_OUTPUTS = 32  # of one work unit of the down matmul
_THREADS, _AT_ONCE = 256, 2  # threads per block; blocks per SM
_RING = 4 * 4 * _THREADS * 16  # bytes of shared memory for the weight pipeline of a block
_LEAST = 1024  # pairs that the workspace always has room for
_TRIED = (64, 1024)  # rows of trials
_STREAMED = 16  # rows up to which streaming weights is faster than multiplying in order


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """Bind the operator. The number of rows alone selects the implementation of the matmuls.

    For batch invariance, whether rows are those of prompts may select it. Raises ValueError for sizes that the kernels
    do not support.
    """
    x, routing = tensors["x"], Routing.of(tensors["router_logits"], attributes)
    _require_sizes(tensors, routing)
    if not x.numel():
        return EmptyCall()
    kept, grouped = _rows_in_order(tensors, context), has_groups(x, context)
    few = OrderedMixture if kept else ExpertsCall
    prompts_apart = grouped and context.batch_invariant and not (kept and _same_bits(tensors, attributes, context))
    if not prompts_apart:
        many = grouped and fill_groups(routing, kept or ITEM)
        return (GroupedMixture if many else few)(tensors, attributes, context)
    windows, prompts = split_rows(tensors, ("x", "router_logits", "mixed"))
    calls: list[Call] = [] if windows is None else [few(windows, attributes, context)]
    if prompts is not None:
        calls.append(GroupedMixture(prompts, attributes, context))
    return CallInParts(calls)


def _rows_in_order(tensors: Tensors, context: Context) -> int:
    """Return the rows of an item that fit into the GPU's shared memory, if they are multiplied in order; else 0.

    Without batch invariance few rows are not, because streaming their weights is faster.
    """
    x, down = tensors["x"], tensors["down"]
    memory = KernelModule.of(context, "experts").shared_memory
    enough = context.batch_invariant or len(x) > _STREAMED
    return rows_of_an_item(max(x.shape[-1], down.shape[-1]), memory) if enough and x.dtype != torch.float32 else 0


def _same_bits(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> bool:
    """Return whether grouped matmuls give random rows the bits of those in order; tried once for weights of a shape."""
    x, logits, weights = tensors["x"], tensors["router_logits"], tensors["gate_up"]

    def tried(rows: int) -> bool:
        generator, alone = torch.Generator(x.device).manual_seed(0), Context(context.device, context.kernels)
        trial = {name: each for name, each in tensors.items() if name != "prompt_rows"}
        for name, like in (("x", x), ("router_logits", logits)):
            trial[name] = torch.randn(rows, like.shape[-1], generator=generator, device=x.device).to(x.dtype)
        results = []
        for kind in (OrderedMixture, GroupedMixture):
            trial["mixed"] = torch.empty_like(trial["x"])
            kind(trial, attributes, alone).run()
            results.append(trial["mixed"])
        return torch.equal(*results)

    def all_tried() -> bool:
        return all(map(tried, _TRIED))

    return context.get_or_create(("bits of experts", weights.shape, *sorted(attributes.items())), all_tried)


class EmptyCall:
    """A bound call without rows."""

    def run(self) -> None:
        """Enqueue nothing."""


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of experts of ``width`` values, as the kernels of ``file`` take them: tensors and numbers.

    ``kinds`` precede the dtype in the names of either weight's kernels. ``gates``: of one work unit of the gate matmul.
    ``kept``: how many rows of an item a block keeps, with how many warps and stages; None: it streams them.
    """

    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]
    width: int
    file: str = "experts"
    kinds: tuple[str, str] = ("", "")
    gates: int = 8
    kept: tuple[int, int, int] | None = None


class ExpertsCall:
    """One bound call that streams weights: those in ``tensors``, or ``weights`` of 4 or 8 bits.

    Tensors are contiguous, as in the schema. Capturable: a run allocates nothing and reads nothing on the host. A row's
    result does not depend on the other rows.
    """

    def __init__(
        self, tensors: Tensors, attributes: Mapping[str, Any], context: Context, weights: ExpertWeights | None = None
    ) -> None:
        x, logits, mixed = (tensors[name] for name in ("x", "router_logits", "mixed"))
        if weights is None:
            weights = ExpertWeights((tensors["gate_up"],), (tensors["down"],), tensors["down"].shape[-1])
        hidden, width, chosen = x.shape[-1], weights.width, Routing.of(logits, attributes)
        pairs, experts, module = chosen.pairs, chosen.experts, KernelModule.of(context, "experts")
        matmuls = KernelModule.of(context, weights.file)
        room = max(_LEAST, 1 << (pairs - 1).bit_length())
        routes = Routes.of(context, room, experts, weights.kept[0] if weights.kept else ITEM)
        activated, parts = context.get_or_create(
            ("experts", room, width, hidden, x.dtype),  # calls of an engine run one after another and share it
            lambda: (x.new_empty(room, width), torch.empty(room, hidden, dtype=torch.float32, device=x.device)),
        )
        sizes, per_token = (np.int32(hidden), np.int32(width)), np.int32(chosen.choices)
        routing = (routes.order, routes.items, routes.item_count)
        shares = routes.routing_weights

        def out(name: str, kind: str, across: int, inner: int, *arguments: Any) -> Launch:
            """Bind a persistent launch: as many blocks as run at a time, at most one per work unit."""
            if weights.kept:
                item, warps, stages = weights.kept
                shared = kept_bytes(item, inner, stages, warps)
                kernel = matmuls.kernel(f"{name}_kept{kind}_{suffix(x)}", shared=shared)
                grid, threads = (module.sm_count, 1, 1), (32 * warps, 1, 1)
                more = (np.int32(item), np.int32(stages))
                return Launch(kernel, grid, threads, *arguments, *more, shared=shared, early=early)
            blocks = min(across * max_items(pairs, experts), _AT_ONCE * module.sm_count)
            kernel = matmuls.kernel(f"{name}{kind}_{suffix(x)}", shared=_RING)
            return Launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), *arguments, shared=_RING, early=early)

        across, early = -(-hidden // (4 * _THREADS)), module.architecture >= HOPPER
        summed = (parts, per_token, sizes[0], mixed)
        self._device = x.device
        self._launches = (
            *routes.launches(module, logits, chosen, tensors.get("expert_factors")),
            out(
                "gate_up",
                weights.kinds[0],
                width // weights.gates,
                hidden,
                x,
                *weights.gate_up,
                *routing,
                *sizes,
                per_token,
                *activation_of(tensors, attributes),
                activated,
            ),
            out(
                "down",
                weights.kinds[1],
                -(-hidden // _OUTPUTS),
                width,
                activated,
                *weights.down,
                *routing,
                shares,
                *sizes,
                tensors.get("down_bias"),
                parts,
            ),
            Launch(module.kernel(f"sum_{suffix(x)}"), (chosen.rows, across, 1), (_THREADS, 1, 1), *summed, early=early),
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


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


def kept_bytes(rows: int, inner: int, stages: int, warps: int) -> int:
    """Return the shared memory of a block that keeps ``rows`` of ``inner`` values beside weights of 4 or 8 bits."""
    return warps * stages * 2048 + rows * 16 * (16 * -(-inner // 128) + 4)
