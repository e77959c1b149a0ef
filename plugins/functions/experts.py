"""``experts`` in standard operators: every expert computes every token, and unselected results are dropped."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue

_REST = np.array([-1], np.int64)


def experts(present: Collection[str] = ()) -> ir.Function:
    """Return the function with the optional inputs in ``present``; see plugins/reference/experts.py.

    Computes in float32 and rounds where the reference rounds. It multiplies all tokens by every expert: a portable
    definition, not a fast implementation.
    """
    body = Body.up_to("experts", present)
    return body.function(mixed=mixture(body, present, body["gate_up"].cast(FLOAT32), body["down"].cast(FLOAT32)))


def mixture(body: Body, present: Collection[str], gate_up: BodyValue, down: BodyValue) -> BodyValue:
    """Return the mixture for weights in float32, rounded to the dtype of ``x``.

    ``present``: optional inputs that nodes have.
    """
    x, router_logits = body["x"], body["router_logits"]
    columns, hidden = router_logits.size(-1), x.size(-1)
    logits = body.op("Reshape", router_logits.cast(FLOAT32), body.concat(_REST, columns, axis=0))
    routed, count = routed_and_all(body)
    selected, routing_weights = _routed(body, logits.first(routed, 1), present)
    # The shared expert, of which there is one or none.
    gates = body.op("Slice", logits, routed, count, np.array([1], np.int64))
    gates = body.op("Transpose", body.op("Sigmoid", gates), perm=[1, 0]).expand_dims(2)
    selected = body.concat(selected, gates * np.float32(0) + np.float32(1), axis=0)
    routing_weights = body.concat(routing_weights, gates, axis=0)
    gate_up_weights = body.op("Reshape", gate_up, body.concat(count, _REST, hidden, axis=0))
    down_weights = body.op("Reshape", down, body.concat(count, hidden, _REST, axis=0))
    rows = body.op("Reshape", x.cast(FLOAT32), body.concat(_REST, hidden, axis=0))
    both = body.matmul(rows, body.op("Transpose", gate_up_weights, perm=[0, 2, 1]))
    if "gate_up_bias" in present:
        both = both + _bias_of_each(body, "gate_up_bias", count)
    activated = body.op("CastLike", _activated(body, both), x).cast(FLOAT32)
    outputs = body.matmul(activated, body.op("Transpose", down_weights, perm=[0, 2, 1]))  # [experts, tokens, hidden]
    if "down_bias" in present:
        outputs = outputs + _bias_of_each(body, "down_bias", count)
    kept = body.where(selected > np.float32(0), outputs * routing_weights, np.float32(0))
    mixed = body.op("ReduceSum", kept, np.array([0], np.int64), keepdims=0)
    return body.op("CastLike", body.op("Reshape", mixed, body.op("Shape", x), allowzero=1), x)


def routed_and_all(body: Body) -> tuple[BodyValue, BodyValue]:
    """Return the number of experts that tokens choose from, and that number with a shared expert; int64 [1] each."""
    shared_columns = body.integer("shared_columns")
    routed = body["router_logits"].size(-1) - shared_columns
    return routed, routed + body.op("Min", shared_columns, np.array([1], np.int64))


def _bias_of_each(body: Body, name: str, count: BodyValue) -> BodyValue:
    """Return the biases ``name``, float32 [experts, 1, outputs]."""
    return body.op("Reshape", body[name].cast(FLOAT32), body.concat(count, _REST, axis=0)).expand_dims(1)


def _activated(body: Body, both: BodyValue) -> BodyValue:
    """Return the activation of gates and ups [experts, tokens, 2 * width]."""
    alpha, cubic, limit, offset = (body.number(name) for name in ("alpha", "cubic", "limit", "offset"))
    interleaved, rows = body.integer("interleaved"), both.size(-1)
    step, half = interleaved + np.int64(1), rows / np.int64(2)  # gates and ups by turns, or in halves
    first_up = body.where(interleaved > np.int64(0), np.int64(1), half)
    gate = body.op("Slice", both, np.array([0], np.int64), half * step, _REST, step)
    up = body.op("Slice", both, first_up, rows, _REST, step)
    bounded = limit > np.float32(0)
    gate = body.where(bounded, body.op("Min", gate, limit), gate)
    up = body.where(bounded, body.op("Max", body.op("Min", up, limit), -limit), up)
    return (up + offset) * gate * body.op("Sigmoid", gate * (alpha + cubic * gate * gate))


def _routed(body: Body, logits: BodyValue, present: Collection[str]) -> tuple[BodyValue, BodyValue]:
    """Return two tensors [routed, tokens, 1]: 1 if a token selects an expert, and its routing weight."""
    per_token, normalized = body.integer("per_token"), body.integer("normalized")
    ordered = body.where(body.op("IsNaN", logits), np.float32(-np.inf), logits)
    _, chosen = body.ops("TopK", ordered, per_token, outputs=2, axis=-1)
    weights = body.op("Softmax", logits, axis=-1).at_last(chosen)
    weights = body.where(normalized > np.int64(0), weights / weights.sum_last(), weights)
    none, ones = (body.op("Expand", np.float32(n), body.op("Shape", like)) for n, like in ((0, logits), (1, weights)))
    selected, routing_weights = (body.op("ScatterElements", none, chosen, each, axis=-1) for each in (ones, weights))
    selected, routing_weights = (
        body.op("Transpose", each, perm=[1, 0]).expand_dims(2) for each in (selected, routing_weights)
    )
    if "expert_factors" in present:
        routing_weights = routing_weights * body["expert_factors"].cast(FLOAT32).expand_dims(1, 2)
    return selected, routing_weights


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (experts(present),)
