"""``experts`` on the GPU: who goes where, gate and up with their activation, down, and each token's sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import Launch, current_stream, suffix
from tandemrt.plugins.launch import Context, Tensors
from tandemrt.plugins.operators import HIDDEN_STEP, MOST_EXPERTS, MOST_PER_TOKEN, WIDTH_STEP

_ITEM, _GATES, _OUTPUTS = 32, 8, 32  # pairs of an item; gates, and outputs of the last product, of a unit
_FEW = 1024  # pairs that one launch chooses and places
_THREADS, _ROUTE_THREADS, _AT_ONCE = 256, 512, 2  # of a block; blocks of a multiprocessor


@dataclass(frozen=True)
class Scratch:
    """What stands between the launches of a call; the calls of an engine follow one another, so they share it."""

    weights: torch.Tensor
    ids: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor
    items: torch.Tensor
    item_count: torch.Tensor
    activated: torch.Tensor
    parts: torch.Tensor

    @classmethod
    def of(cls, pairs: int, experts: int, hidden: int, width: int, like: torch.Tensor) -> "Scratch":
        """Room for ``pairs`` of a row and an expert."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=like.device)

        return cls(
            weights=torch.empty(pairs, dtype=torch.float32, device=like.device),
            ids=ints(pairs),
            order=ints(pairs),
            ends=ints(experts),
            items=ints(_items(pairs, experts), 4),
            item_count=ints(1),
            activated=torch.empty(pairs, width, dtype=like.dtype, device=like.device),
            parts=torch.empty(pairs, hidden, dtype=torch.float32, device=like.device),
        )


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Mixture":
    """See plugins/launch.py."""
    return Mixture(tensors, attributes, context)


class Mixture:
    """One call, bound; tensors as the schema says, contiguous. Capturable: a run allocates nothing and reads nothing on
    the host.

    Raises ValueError for sizes that the kernels do not take.
    """

    def __init__(self, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> None:
        x, logits, gate_up, down, mixed = (tensors[name] for name in ("x", "router_logits", "gate_up", "down", "mixed"))
        hidden, width, experts, chosen = x.shape[-1], down.shape[-1], logits.shape[-1], attributes["per_token"]
        rows = logits.numel() // experts
        _require_sizes(tensors, experts, chosen)
        self._device = x.device
        self._launches: tuple[Launch, ...] = ()
        if not rows:
            return
        pairs = rows * chosen
        room = max(_FEW, 1 << (pairs - 1).bit_length())
        key = ("experts", room, experts, hidden, width, x.dtype)
        scratch = context.keep(key, lambda: Scratch.of(room, experts, hidden, width, x))
        module, kind = context.module("experts"), suffix(x)
        counts = [np.int32(each) for each in (rows, experts, chosen, attributes["normalized"])]
        sizes = np.int32(hidden), np.int32(width)
        placed = (scratch.order, scratch.ends, scratch.items, scratch.item_count)
        given = (scratch.order, scratch.items, scratch.item_count)
        chosen_by = np.int32(chosen)

        def bound(name: str, blocks: int, *arguments: Any, threads: int = _THREADS, along: int = 1) -> Launch:
            return Launch(module.kernel(f"{name}_{kind}"), (blocks, along, 1), (threads, 1, 1), *arguments)

        def units(each: int) -> int:
            return min(each * _items(pairs, experts), _AT_ONCE * module.processors)

        if pairs <= _FEW:
            route = [bound("route_few", experts, logits, *counts, scratch.weights, *placed, threads=_ROUTE_THREADS)]
        else:
            route = [
                bound("choose", -(-rows // (_THREADS // 32)), logits, *counts, scratch.ids, scratch.weights),
                bound(
                    *("place", experts, scratch.ids, np.int32(pairs), np.int32(experts), *placed),
                    threads=_ROUTE_THREADS,
                ),
            ]
        self._launches = (
            *route,
            bound("gate_up", units(width // _GATES), x, gate_up, *given, *sizes, chosen_by, scratch.activated),
            bound(
                *("down", units(-(-hidden // _OUTPUTS)), scratch.activated, down, *given, scratch.weights, *sizes),
                scratch.parts,
            ),
            bound("sum", rows, scratch.parts, chosen_by, sizes[0], mixed, along=-(-hidden // (4 * _THREADS))),
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        stream = current_stream(self._device)
        for each in self._launches:
            each.run(stream)


def _items(pairs: int, experts: int) -> int:
    """At most so many: each expert's last one may be short."""
    return min(experts, pairs) + pairs // _ITEM


def _require_sizes(tensors: Tensors, experts: int, chosen: int) -> None:
    x, gate_up, down, mixed = (tensors[name] for name in ("x", "gate_up", "down", "mixed"))
    hidden, width = x.shape[-1], down.shape[-1]
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
