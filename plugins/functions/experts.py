"""``experts`` in standard operators: every expert computes every token, and what was not chosen is left out."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, Tensor

_REST = np.array([-1], np.int64)


def experts() -> ir.Function:
    """x, router_logits, gate_up, down → mixed; see plugins/reference/experts.py. In float32, rounded where that does.

    A product for each expert over all tokens: a definition that graphs carry, not a fast way.
    """
    body = Body.of("experts")
    x, router_logits, gate_up, down = body.inputs
    count, hidden = router_logits.size(-1), x.size(-1)
    logits = body.op("Reshape", router_logits.cast(FLOAT32), body.concat(_REST, count, axis=0))
    picked, shares = _routed(body, logits)
    wide = body.op("Reshape", gate_up.cast(FLOAT32), body.concat(count, _REST, hidden, axis=0))
    narrow = body.op("Reshape", down.cast(FLOAT32), body.concat(count, hidden, _REST, axis=0))
    rows = body.op("Reshape", x.cast(FLOAT32), body.concat(_REST, hidden, axis=0))
    both = body.op("MatMul", rows, body.op("Transpose", wide, perm=[0, 2, 1]))
    gate, up = body.ops("Split", both, outputs=2, axis=-1, num_outputs=2)
    activated = body.op("CastLike", gate * body.op("Sigmoid", gate) * up, x).cast(FLOAT32)
    given = body.op("MatMul", activated, body.op("Transpose", narrow, perm=[0, 2, 1]))  # [experts, tokens, hidden]
    kept = body.where(picked > np.float32(0), given * shares, np.float32(0))
    mixed = body.op("ReduceSum", kept, np.array([0], np.int64), keepdims=0)
    return body.function(mixed=body.op("CastLike", body.op("Reshape", mixed, body.op("Shape", x), allowzero=1), x))


def _routed(body: Body, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, tokens, 1] each: 1 where a token chose an expert, and what it counts for there."""
    per_token, normalized = (
        body.op("Constant", value_int=body.attribute(name, ir.AttributeType.INT, "value_int"))
        for name in ("per_token", "normalized")
    )
    ordered = body.where(body.op("IsNaN", logits), np.float32(-np.inf), logits)
    _, chosen = body.ops("TopK", ordered, per_token.expand_dims(0), outputs=2, axis=-1)
    weights = body.op("Softmax", logits, axis=-1).at_last(chosen)
    weights = body.where(normalized > np.int64(0), weights / weights.sum_last(), weights)
    none, ones = (body.op("Expand", np.float32(n), body.op("Shape", like)) for n, like in ((0, logits), (1, weights)))
    picked, shares = (body.op("ScatterElements", none, chosen, each, axis=-1) for each in (ones, weights))
    picked, shares = (body.op("Transpose", each, perm=[1, 0]).expand_dims(2) for each in (picked, shares))
    return picked, shares


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (experts(),)
