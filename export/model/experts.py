"""A mixture of experts: a router, followed by an ``If`` per expert or by one operator of the project."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.export.graph.builder import GraphBuilder, dims_of, without_trailing_none
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.activation import activate, clamped_swiglu
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.low_bit_experts import low_bit_experts, low_bit_forms
from tandemrt.export.read.layer import Experts, Router
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import ACTIVATIONS, DOMAIN

COLUMNS = 8  # a matmul's outputs should be a multiple of this; the router's are with the gate of a shared expert


class Mixture(Protocol):
    """Append a mixture of experts: the weighted sum of the outputs of each token's experts, [..., hidden].

    ``name`` is the prefix of the MLP's tensors in the checkpoint. ``routed``: what the router reads; None: ``x``.
    """

    def __call__(
        self,
        b: GraphBuilder,
        x: ir.Value,
        w: Weights,
        spec: ModelSpec,
        experts: Experts,
        name: str,
        routed: ir.Value | None = None,
    ) -> ir.Value: ...


def experts_operator(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    experts: Experts,
    name: str,
    routed: ir.Value | None = None,
) -> ir.Value:
    """Append the router's matmul and the operator of experts, for models that export/model/support.py accepts.

    The operator reads all experts of a layer as one weight. Checkpoints store experts one by one, or in another order,
    so the runtime concatenates them when it opens the bundle. A shared expert, for which ``is_like_the_others``, is the
    last of them. Raises BadCheckpoint for experts of unequal formats.
    """
    router, shared = Linear.stored(f"{name}.gate", experts.count, bias=experts.biased), experts.shared
    shared_columns = 0 if shared is None else COLUMNS - experts.count % COLUMNS
    if shared is not None and shared.gate is not None:
        gate = Linear.stored(f"{name}.{shared.gate}", 1)
        router = merge_linears(router, *[gate] * shared_columns)
    logits = router(b, x if routed is None else routed, w)
    if experts.router != Router(scale=experts.router.scale):
        # The operator's softmax over the logarithms of weights whose sum is 1 gives these weights.
        unscaled = replace(experts, router=replace(experts.router, scale=1.0))
        logits = b.cast(b.op("Log", _routed(b, logits, w, unscaled, name)), w.dtype)
    stems, width = [f"{name}.experts.{expert}" for expert in range(experts.count)], experts.intermediate
    stems += [] if shared is None else [f"{name}.{shared.name}"]
    kinds = ("gate", "up") if experts.gate_up == "separate" else ("gate_up",)
    both, out = [f"{stem}.{kind}_proj" for stem in stems for kind in kinds], [f"{stem}.down_proj" for stem in stems]
    rows, outputs = [2 * width // len(kinds)] * len(both), [spec.hidden] * len(stems)
    more: list[ir.Value | None] = [None, None, None]  # biases of both weights, factors of the experts
    if experts.biased:
        more[:2] = (w.stacked([f"{each}.bias" for each in of], counts) for of, counts in ((both, rows), (out, outputs)))
    if experts.norms is not None:
        more[2] = w(f"{name}.gate.per_expert_scale", (experts.count,))
    how = {"shared_columns": shared_columns, **_attributes(spec, experts)}
    of_both, of_out = ([f"{each}.weight" for each in of] for of in (both, out))
    if (forms := low_bit_forms(w, of_both, of_out)) is not None:
        mixed = low_bit_experts(b, x, logits, w, of_both, of_out, forms, width, more, how)
    else:
        gate_up = _all_experts(b, w, of_both, rows, spec.hidden, f"{name}.experts.gate_up")
        down = _all_experts(b, w, of_out, outputs, width, f"{name}.experts.down")
        inputs = without_trailing_none([x, logits, gate_up, down, *more])
        (mixed,) = b.custom("experts", *inputs, domain=DOMAIN, outputs=[(w.dtype, dims_of(x))], **how)
    scale = experts.router.scale
    return mixed if scale == 1.0 else b.op("Mul", mixed, b.constant(scale, w.dtype))


def is_like_the_others(w: Weights, spec: ModelSpec, experts: Experts, name: str) -> bool:
    """Return whether the operator of experts can compute the shared expert as one more, with a sigmoid as its weight.

    It needs a gate, the others' width and format, and neither biases nor norms of its own.
    """
    shared = experts.shared
    if shared is None or shared.gate is None or shared.intermediate != experts.intermediate:
        return False
    if experts.biased or experts.gate_up != "separate" or experts.norms is not None or experts.router != Router():
        return False
    if experts.clamped is not None or spec.mlp_bias or (spec.scales.mlp_gate, spec.scales.mlp_output) != (1.0, 1.0):
        return False
    kinds = ("gate_proj", "up_proj", "down_proj")
    forms = ([w.quantized(f"{name}.{stem}.{kind}") for kind in kinds] for stem in ("experts.0", shared.name))
    gates = [w.quantized(f"{name}.{gate}") for gate in ("gate", shared.gate)]
    return next(forms) == next(forms) and gates == [None, None]


def optional_inputs_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the optional inputs of the operator of experts that the nodes of a model have."""
    experts = spec.experts
    biases = ("gate_up_bias", "down_bias") if experts is not None and experts.biased else ()
    return (*biases, "expert_factors") if experts is not None and experts.norms is not None else biases


def _attributes(spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    """Return the attributes of the operator."""
    activation = dict(ACTIVATIONS[spec.activation])
    if (clamped := experts.clamped) is not None:
        activation |= {"alpha": clamped.alpha, "limit": clamped.limit, "offset": clamped.offset}
    routing = {"per_token": experts.per_token, "normalized": int(experts.normalized)}
    return {**routing, "interleaved": int(experts.gate_up == "interleaved"), **activation}


def _all_experts(
    b: GraphBuilder, w: Weights, names: Sequence[str], rows: Sequence[int], inner: int, name: str
) -> ir.Value:
    """Return weights [rows_i, inner] as one. Those stored as [inputs, outputs] are transposed when an engine loads."""
    if not w.transposed(names[0]):
        return w.stacked(names, rows, (inner,), name=name)
    stored = w.stacked(names, [inner] * len(names), (rows[0],), name=name)
    split = b.op("Reshape", stored, b.constant([len(names), inner, rows[0]]))
    return b.op("Reshape", b.op("Transpose", split, perm=[0, 2, 1]), b.constant([sum(rows), inner]))


def expert_branches(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    experts: Experts,
    name: str,
    routed: ir.Value | None = None,
) -> ir.Value:
    """Append standard operators, for [batch, query, hidden]: an ``If`` per expert that runs it for its tokens.

    Each expert's weights stay in the checkpoint's file and are read only if a token of the call selects the expert. A
    token's outputs are summed in the order of the experts, and matmuls round a row independently of the others, so a
    token has the same bits alone and in a draft window. onnxruntime's ``MoE`` for CPUs does not guarantee that, and
    reads all experts as one tensor in another order.
    """
    router = Linear.stored(f"{name}.gate", experts.count, bias=experts.biased)
    logits = b.op("Reshape", router(b, x if routed is None else routed, w), b.constant([-1, experts.count]))
    routing_weights = b.op("Transpose", b.cast(_routed(b, logits, w, experts, name), w.dtype), perm=[1, 0])
    # Compared before the reduction, so that a NaN in one row cannot hide the experts that another row selected.
    sizes = routing_weights if experts.norms is None else b.op("Abs", routing_weights)  # stored factors have a sign
    selected = b.cast(b.op("Greater", sizes, b.constant(0, w.dtype)), "int32")
    none = b.constant([[0]] * experts.count, "int32")  # the last layer of a prompt chunk has no token
    chosen = b.op("ReduceMax", b.op("Concat", selected, none, axis=1), b.constant([1]), keepdims=0)
    chosen = b.cast(chosen, "bool")
    read = (
        Linear.stored(f"{name}.fc1_latent_proj", experts.latent, bias=spec.mlp_bias)(b, x, w) if experts.latent else x
    )
    flat = b.op("Reshape", read, b.constant([-1, experts.latent or spec.hidden]))
    total = b.op("Mul", flat, b.constant(0, w.dtype))
    for expert in range(experts.count):
        total = _added(b, total, flat, routing_weights, chosen, w, spec, experts, expert, name)
    result = b.op("Reshape", total, b.op("Shape", read), allowzero=1)
    result.shape = ir.Shape(dims_of(read))
    if not experts.latent:
        return result
    return Linear.stored(f"{name}.fc2_latent_proj", spec.hidden, bias=spec.mlp_bias)(b, result, w)


def _routed(b: GraphBuilder, logits: ir.Value, w: Weights, experts: Experts, name: str) -> ir.Value:
    """Return the routing weights, float32[..., experts]; 0 for experts that a token does not select."""
    router, logits = experts.router, b.cast(logits, "float32")
    if router.scoring == "sparsemixer":
        weights, indices = _one_after_another(b, logits, experts)
        return b.op("ScatterElements", b.op("Mul", logits, b.constant(0, "float32")), indices, weights, axis=-1)
    scores = b.op("Softmax", logits, axis=-1) if router.scoring == "softmax" else b.op("Sigmoid", logits)
    ranked = scores
    if router.correction:
        stored = w.unconverted(
            f"{name}.gate.e_score_correction_bias", tuple(COMPUTE), (experts.count,), (1, experts.count)
        )
        ranked = b.op("Add", scores, b.cast(stored, "float32"))
    if router.groups > 1:
        ranked = _of_best_groups(b, ranked, experts)
    weights, indices = b.ops("TopK", ranked, b.constant([experts.per_token]), outputs=2, axis=-1)
    if ranked is not scores:
        weights = b.op("GatherElements", scores, indices, axis=-1)
    if experts.normalized:
        total = b.op("ReduceSum", weights, b.constant([-1]), keepdims=1)
        if router.added_sum:
            total = b.op("Add", total, b.constant(router.added_sum, "float32"))
        if router.least_sum:
            total = b.op("Max", total, b.constant(router.least_sum, "float32"))
        weights = b.op("Div", weights, total)
    if router.scale != 1.0:
        weights = b.op("Mul", weights, b.constant(router.scale, "float32"))
    nothing = b.op("Mul", scores, b.constant(0, "float32"))
    placed = b.op("ScatterElements", nothing, indices, weights, axis=-1)
    if experts.norms is None:
        return placed
    factors = w.stored(f"{name}.gate.per_expert_scale", (experts.count,))
    return b.op("Mul", placed, b.cast(factors, "float32"))


def _one_after_another(b: GraphBuilder, logits: ir.Value, experts: Experts) -> tuple[ir.Value, ir.Value]:
    """Return the weights and the indices of the experts that sparsemixer chooses, both [..., per_token]."""
    nothing, chosen, left = b.constant(-np.inf, "float32"), [], logits
    for _ in range(experts.per_token):
        best, index = b.ops("TopK", left, b.constant([1]), outputs=2, axis=-1)
        distance = b.op("Div", b.op("Sub", best, logits), b.op("Max", b.op("Abs", logits), best))
        far = b.op("Greater", distance, b.constant(2 * experts.router.jitter, "float32"))
        near = b.op("Softmax", b.op("Where", far, nothing, left), axis=-1)
        chosen.append((b.op("GatherElements", near, index, axis=-1), index))
        gone = b.op("Add", b.op("Mul", best, b.constant(0, "float32")), nothing)
        left = b.op("ScatterElements", left, index, gone, axis=-1)
    weights, indices = (b.op("Concat", *each, axis=-1) for each in zip(*chosen, strict=True))
    return weights, indices


def _of_best_groups(b: GraphBuilder, ranked: ir.Value, experts: Experts) -> ir.Value:
    """Return ``ranked`` [..., experts] with -inf for the experts of groups that are not chosen."""
    router, size = experts.router, experts.count // experts.router.groups
    before = [0] * (len(dims_of(ranked)) - 1)  # dimensions that a Reshape keeps
    grouped = b.op("Reshape", ranked, b.constant([*before, router.groups, size]))
    best, _ = b.ops("TopK", grouped, b.constant([router.best_of_group]), outputs=2, axis=-1)
    # A ReduceSum of no tokens loses the dimension of the groups.
    each = [b.op("Gather", best, b.constant(at), axis=-1) for at in range(router.best_of_group)]
    of_groups = reduce(lambda one, two: b.op("Add", one, two), each)
    _, chosen = b.ops("TopK", of_groups, b.constant([router.chosen_groups]), outputs=2, axis=-1)
    none, ones = (b.op("Mul", value, b.constant(0, "float32")) for value in (of_groups, b.cast(chosen, "float32")))
    marked = b.op("ScatterElements", none, chosen, b.op("Add", ones, b.constant(1, "float32")), axis=-1)
    kept = b.op("Unsqueeze", b.op("Greater", marked, b.constant(0, "float32")), b.constant([-1]))
    left = b.op("Where", kept, grouped, b.constant(-np.inf, "float32"))
    return b.op("Reshape", left, b.constant([*before, experts.count]))


def _added(
    b: GraphBuilder,
    total: ir.Value,
    flat: ir.Value,
    routing_weights: ir.Value,
    chosen: ir.Value,
    w: Weights,
    spec: ModelSpec,
    experts: Experts,
    expert: int,
    name: str,
) -> ir.Value:
    """Return ``total`` [tokens, hidden or latent] plus the weighted outputs of one expert for its tokens."""
    stem, index = f"{name}.experts.{expert}", b.constant(expert)
    down = Linear.stored(f"{stem}.down_proj", experts.latent or spec.hidden, bias=experts.biased)

    def run() -> tuple[ir.Value]:
        mine = b.op("Gather", routing_weights, index, axis=0)
        tokens = b.op("Squeeze", b.op("NonZero", mine), b.constant([0]))
        weights = b.op("Gather", b.op("Unsqueeze", mine, b.constant([1])), tokens)
        rows = b.op("Gather", flat, tokens)
        if experts.weighted_input:
            rows = b.op("Mul", rows, weights)
        rows = b.op("Unsqueeze", rows, b.constant([0]))  # matmuls take [batch, query, inner]
        outputs = b.op("Squeeze", down(b, _activated(b, rows, w, spec, experts, stem), w), b.constant([0]))
        places = b.op("Unsqueeze", tokens, b.constant([1]))
        weighted = outputs if experts.weighted_input else b.op("Mul", outputs, weights)
        return (b.op("ScatterND", total, places, weighted, reduction="add"),)

    [result] = b.branch(b.op("Gather", chosen, index), run, lambda: (b.op("Identity", total),))
    return result


def _activated(b: GraphBuilder, rows: ir.Value, w: Weights, spec: ModelSpec, experts: Experts, stem: str) -> ir.Value:
    """Return the input of an expert's down matmul, [1, rows, intermediate]."""
    width = experts.intermediate
    if experts.gate_up == "separate":
        gate, up = (
            Linear.stored(f"{stem}.{kind}_proj", width, bias=experts.biased)(b, rows, w)
            if spec.gated or kind == "up"
            else None
            for kind in ("gate", "up")
        )
        assert up is not None
    else:
        both = Linear.stored(f"{stem}.gate_up_proj", 2 * width, bias=experts.biased)(b, rows, w)
        shape, axis = ([1, -1, width, 2], 3) if experts.gate_up == "interleaved" else ([1, -1, 2, width], 2)
        pairs = b.op("Reshape", both, b.constant(shape))
        gate, up = (b.op("Gather", pairs, b.constant(at), axis=axis) for at in (0, 1))
    if experts.clamped is not None and gate is not None:
        return clamped_swiglu(b, gate, up, experts.clamped, w.dtype)
    return activate(b, gate, up, spec.activation)
