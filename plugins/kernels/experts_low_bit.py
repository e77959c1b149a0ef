"""Experts with weights of 4 or 8 bits on a GPU: the kernels of ``experts``, which turn words into numbers.

They read weights once for up to 32 rows of an expert, and give a row the same bits in any call. With weights in floats
and more than a few rows, blocks keep 8 or 16 rows of an expert, and give the same bits. Many rows, and for batch
invariance those of prompts, go through dequantized weights and torch's grouped matmuls
(plugins/kernels/experts_grouped.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.experts import (
    EmptyCall,
    ExpertsCall,
    ExpertWeights,
    kept_bytes,
    require_counts,
    require_of_experts,
)
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, GroupedWeight, has_groups
from tandemrt.plugins.kernels.experts_route import Routing
from tandemrt.plugins.kernels.low_bit_format import FLOAT4, FLOAT8, INT4, INT8, Format, dequantization
from tandemrt.plugins.kernels.module import KernelModule, Tensors, suffix
from tandemrt.plugins.kernels.prompt_rows import CallInParts, split_rows
from tandemrt.plugins.operators.constants import LOW_BIT_EXPERTS_MULTIPLE
from tandemrt.plugins.operators.int4_layout import padded_inner
from tandemrt.plugins.operators.launch import Call, Context

_MANY_PAIRS = 32  # pairs per expert, if routing is uniform, from which on dequantized weights are faster
_MOST_SCRATCH = 1 << 30  # bytes of a dequantized weight
_KEPT = 8  # rows from which on blocks keep them
_GATES = 16  # of one work unit

# Arguments of the kernels: numbers, scales, zero points or factors, a shift
_Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, np.int32]


def _launch(form: Format, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """Bind the operator. The number of rows alone selects the implementation; for batch invariance their kind does.

    Raises ValueError for dtypes, shapes and sizes that the kernels do not support.
    """
    x, logits, mixed, gate_up = (tensors[name] for name in ("x", "router_logits", "mixed", "gate_up"))
    hidden, routing = x.shape[-1], Routing.of(logits, attributes)
    experts = routing.experts
    width = len(gate_up) // (2 * experts)
    if x.dtype not in (torch.bfloat16, torch.float16) or {logits.dtype, mixed.dtype} != {x.dtype}:
        raise ValueError(
            f"x, router_logits, mixed: bfloat16 or float16 is needed, the same for all; got {x.dtype}, {logits.dtype}, "
            f"{mixed.dtype}"
        )
    require_counts(hidden, width, routing, (LOW_BIT_EXPERTS_MULTIPLE,) * 2)
    require_of_experts(tensors, hidden, width, routing)
    both = _weight(form, tensors, "gate_up", 2 * experts * width, hidden, attributes["gate_up_group"])
    last = _weight(form, tensors, "down", experts * hidden, width, attributes["down_group"])
    if not x.numel():
        return EmptyCall()
    kinds = form.variant(both[2], int(both[3])), form.variant(last[2], int(last[3]))
    file, fits = f"experts_{form.name}", len(gate_up) * hidden * x.element_size() <= _MOST_SCRATCH
    grouped = fits and has_groups(x, context)

    def streamed(rows: Tensors) -> Call:
        kept = _kept(form, Routing.of(rows["router_logits"], attributes), max(hidden, width), context)
        return ExpertsCall(rows, attributes, context, ExpertWeights(both, last, width, file, kinds, _GATES, kept))

    def dequantized(rows: Tensors) -> Call:
        values = _dequantized(context, x, file, kinds, (both, hidden), (last, width))
        return GroupedMixture(rows, attributes, context, values)

    if not context.batch_invariant:
        many = routing.rows * routing.per_token >= _MANY_PAIRS * routing.routed
        return (dequantized if grouped and many else streamed)(tensors)
    windows, prompts = split_rows(tensors, ("x", "router_logits", "mixed"))
    calls: list[Call] = [] if windows is None else [streamed(windows)]
    if prompts is not None:
        calls.append((dequantized if grouped else streamed)(prompts))
    return CallInParts(calls)


def _kept(form: Format, routing: Routing, inner: int, context: Context) -> tuple[int, int, int] | None:
    """Return the rows of an item that blocks keep, their warps and stages; None where streaming rows is faster."""
    if form not in (FLOAT4, FLOAT8) or routing.rows < _KEPT:
        return None
    kept = (8 if routing.rows * routing.per_token <= 4 * routing.routed else 16, 16, 3)
    fits = kept_bytes(kept[0], inner, kept[2], kept[1]) <= KernelModule.of(context, "experts").shared_memory
    return kept if fits else None


def _dequantized(
    context: Context, x: torch.Tensor, file: str, kinds: tuple[str, str], *weights: tuple[_Weight, int]
) -> tuple[GroupedWeight, GroupedWeight]:
    """Bind dequantization of the two ``weights``, each with its inputs, to scratch memory that an engine shares."""
    module = KernelModule.of(context, file)
    size = max(len(numbers) * inner for (numbers, *_), inner in weights)
    scratch = context.get_or_create(("dequantized experts", x.dtype, size), lambda: x.new_empty(size))

    def bound(kind: str, weight: _Weight, inner: int) -> GroupedWeight:
        values = scratch[: len(weight[0]) * inner].view(-1, inner)
        return GroupedWeight(values, dequantization(module.kernel(f"weights{kind}_{suffix(x)}"), *weight, values))

    both, last = (bound(kind, *weight) for kind, weight in zip(kinds, weights, strict=True))
    return both, last


launch_int4, launch_int8, launch_float4, launch_float8 = (
    partial(_launch, form) for form in (INT4, INT8, FLOAT4, FLOAT8)
)


def _weight(form: Format, tensors: Tensors, name: str, rows: int, inner: int, group: int) -> _Weight:
    """Return the kernels' arguments for a weight [rows, inner]. Raises ValueError for other shapes."""
    weight, scales = tensors[name], tensors[f"{name}_scales"]
    if group not in form.groups:
        raise ValueError(f"{name}: a scale for {', '.join(map(str, form.groups))} inputs is needed, got {group}")
    shapes = (rows, padded_inner(inner) * form.bits // 8), (rows, form.scales_of_output(inner, group))
    if (weight.shape, scales.shape) != shapes:
        raise ValueError(
            f"{name} and its scales: {shapes[0]} and {shapes[1]} are needed, got {tuple(weight.shape)} and "
            f"{tuple(scales.shape)}"
        )
    return weight, scales, tensors.get(f"{name}_{form.more}"), np.int32(form.groups.index(group))
