"""``experts`` in standard operators: every expert computes every token, and unselected results are dropped."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue

_REST = np.array([-1], np.int64)


def experts(*, prompt_rows: bool = False) -> ir.Function:
    """x, router_logits, gate_up, down → mixed; see plugins/reference/experts.py. ``prompt_rows``: with that input.

    Computes in float32 and rounds where the reference rounds. It multiplies all tokens by every expert: a portable
    definition, not a fast implementation.
    """
    body = Body.of("experts", without=() if prompt_rows else ("prompt_rows",))
    x, router_logits, gate_up, down, *_ = body.inputs
    return body.function(mixed=mixture(body, x, router_logits, gate_up.cast(FLOAT32), down.cast(FLOAT32)))


def mixture(body: Body, x: BodyValue, router_logits: BodyValue, gate_up: BodyValue, down: BodyValue) -> BodyValue:
    """Return the mixture of ``x`` for weights in float32, rounded to the dtype of ``x``."""
    count, hidden = router_logits.size(-1), x.size(-1)
    logits = body.op("Reshape", router_logits.cast(FLOAT32), body.concat(_REST, count, axis=0))
    selected, routing_weights = _routed(body, logits)
    gate_up_weights = body.op("Reshape", gate_up, body.concat(count, _REST, hidden, axis=0))
    down_weights = body.op("Reshape", down, body.concat(count, hidden, _REST, axis=0))
    rows = body.op("Reshape", x.cast(FLOAT32), body.concat(_REST, hidden, axis=0))
    both = body.matmul(rows, body.op("Transpose", gate_up_weights, perm=[0, 2, 1]))
    gate, up = body.ops("Split", both, outputs=2, axis=-1, num_outputs=2)
    activated = body.op("CastLike", gate * body.op("Sigmoid", gate) * up, x).cast(FLOAT32)
    outputs = body.matmul(activated, body.op("Transpose", down_weights, perm=[0, 2, 1]))  # [experts, tokens, hidden]
    kept = body.where(selected > np.float32(0), outputs * routing_weights, np.float32(0))
    mixed = body.op("ReduceSum", kept, np.array([0], np.int64), keepdims=0)
    return body.op("CastLike", body.op("Reshape", mixed, body.op("Shape", x), allowzero=1), x)


def _routed(body: Body, logits: BodyValue) -> tuple[BodyValue, BodyValue]:
    """Return two tensors [experts, tokens, 1]: 1 if a token selects an expert, and its routing weight."""
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
    return selected, routing_weights


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (experts(prompt_rows="prompt_rows" in present),)
