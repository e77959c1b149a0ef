"""``decode_attention`` in standard operators; it runs where no C compiler builds the kernel."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import Body, BodyValue


def decode_attention(present: Collection[str] = ()) -> ir.Function:
    """Return the function; inputs and outputs as in the reference. ``present``: the optional inputs that nodes have."""
    body = Body.up_to("decode_attention", present)
    qkv, past_key, past_value, index, cosine, sine, *ends = body.inputs
    heads, kv_heads, head_dim = body.integer("heads"), past_key.size(1), past_key.size(3)
    zeros, query = np.zeros(1, np.int64), qkv.size(1)
    positions = index.expand_dims(1) + body.arange(query)

    def headed(x: BodyValue) -> BodyValue:  # [batch, heads, query, head_dim]
        split = body.op("Reshape", x, body.concat(zeros, zeros, np.array([-1], np.int64), head_dim, axis=0))
        return body.op("Transpose", split, perm=[0, 2, 1, 3])

    widths = body.concat(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, axis=0)
    q, k, v = (headed(x) for x in body.ops("Split", qkv, widths, outputs=3, axis=2))
    q, k = (_rotated(body, x, cosine, sine, positions) for x in (q, k))
    key, value = (
        body.op("TensorScatter", past, new, index, axis=2, mode="linear")
        for past, new in ((past_key, k), (past_value, v))
    )
    seen, window = body.arange(key.size(2)), body.integer("sliding_window")
    distance = positions.expand_dims(2) - seen  # [batch, query, capacity]
    in_window = (distance < window) | window.equals(np.int64(0))
    before_end = distance >= np.int64(0)
    for end in ends:
        before_end |= end.expand_dims(2) > seen
    visible = (before_end & in_window).expand_dims(1, 2)

    # The query heads of a KV head are one more dimension. Unwritten entries may hold NaN.
    grouped = body.op("Reshape", q, body.concat(zeros, kv_heads, heads / kv_heads, query, head_dim, axis=0))
    turned = body.op("Transpose", key, perm=[0, 1, 3, 2]).expand_dims(2)
    scores = body.where(visible, body.matmul(grouped * body.number("scale"), turned), np.float32(-np.inf))
    written = (index + query).expand_dims(1) > seen  # [batch, capacity]
    values = body.where(written.expand_dims(1, 3), value, np.float32(0)).expand_dims(2)
    mixed = body.matmul(body.op("Softmax", scores, axis=-1), values)
    by_head = body.op("Reshape", mixed, body.concat(zeros, heads, query, head_dim, axis=0))
    by_token = body.op("Transpose", by_head, perm=[0, 2, 1, 3])
    joined = body.op("Reshape", by_token, body.concat(zeros, zeros, heads * head_dim, axis=0))
    return body.function(mixed=joined, present_key=key, present_value=value)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (decode_attention(present),)


def _rotated(body: Body, x: BodyValue, cosine: BodyValue, sine: BodyValue, positions: BodyValue) -> BodyValue:
    """Return ``x`` [batch, heads, query, head_dim], rotated for ``positions`` [batch, query]."""
    half = cosine.size(1)
    cos, sin = (body.op("Gather", table, positions, axis=0).expand_dims(1) for table in (cosine, sine))
    widths = body.concat(half, half, x.size(3) - half * np.array([2], np.int64), axis=0)
    first, second, rest = body.ops("Split", x, widths, outputs=3, axis=3)
    return body.concat(first * cos - second * sin, second * cos + first * sin, rest, axis=3)
