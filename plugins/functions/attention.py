"""``window_attention`` in standard operators."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, Body, Tensor


def window_attention(*, qk_norm: bool) -> ir.Function:
    """Inputs and outputs as in the reference; ``qk_norm`` adds the inputs q_norm and k_norm.

    Attributes, all of them required: heads, kv_heads, sliding_window (int), scale, epsilon (float). A cache output
    may be bound to the memory of its input. Reads the blocks up to the longest row; scores and sums are float32.
    """
    body = Body.of("window_attention", without=() if qk_norm else ("q_norm", "k_norm"))
    qkv, key_cache, value_cache, block_table, write_index, cosine, sine, *norms = body.inputs
    heads, kv_heads = _integer(body, "heads"), _integer(body, "kv_heads")
    block_size, head_dim = key_cache.size(2), key_cache.size(3)
    steps = body.arange(qkv.size(1))
    positions = write_index.expand_dims(1) + steps
    table = block_table.cast(INT64)

    q, k, v = body.ops(
        "Split",
        body.op("Reshape", qkv, body.concat(np.array([0, 0, -1], np.int64), head_dim, axis=0)),
        body.concat(heads, kv_heads, kv_heads, axis=0),
        outputs=3,
        axis=2,
    )  # [batch, query, heads, head_dim]
    epsilon = body.attribute("epsilon", ir.AttributeType.FLOAT, "epsilon")
    if qk_norm:
        q, k = (
            body.op("RMSNormalization", x, norm, axis=-1, epsilon=epsilon, stash_type=1)
            for x, norm in zip((q, k), norms, strict=True)
        )
    q, k = (
        body.op("RotaryEmbedding", body.op("Transpose", x, perm=[0, 2, 1, 3]), cosine, sine, positions) for x in (q, k)
    )  # [batch, heads, query, head_dim]

    at = [body.op("GatherElements", table, positions / block_size, axis=1), body.op("Mod", positions, block_size)]
    everywhere = body.concat(positions.size(0), positions.size(1), kv_heads, axis=0)
    block, offset = (body.op("Expand", x.expand_dims(2), everywhere) for x in at)
    head = body.op("Expand", body.arange(kv_heads), everywhere)
    indices = body.concat(*(x.expand_dims(3) for x in (block, head, offset)), axis=3)
    present_key = body.op("ScatterND", key_cache, indices, body.op("Transpose", k, perm=[0, 2, 1, 3]))
    present_value = body.op("ScatterND", value_cache, indices, v)

    length = body.op("ReduceMax", positions, keepdims=0) + np.int64(1)
    used = table.first((length + block_size - np.int64(1)) / block_size, axis=1)

    def gathered(cache: Tensor) -> Tensor:  # [batch, kv_heads, tokens, head_dim]
        blocks = body.op("Transpose", body.op("Gather", cache, used, axis=0), perm=[0, 2, 1, 3, 4])
        shape = body.concat(np.array([0], np.int64), kv_heads, np.array([-1], np.int64), head_dim, axis=0)
        return body.op("Reshape", blocks, shape).cast(FLOAT32)

    keys, values = gathered(present_key), gathered(present_value)
    seen = body.arange(keys.size(2))
    distance = positions.expand_dims(2) - seen  # [batch, query, tokens]
    window = _integer(body, "sliding_window")
    visible = (distance >= np.int64(0)) & ((distance < window) | window.equals(np.int64(0)))
    # Entries that no token of the row sees may hold anything: NaN times a weight of 0 would still be NaN.
    cached = (write_index.expand_dims(1) + qkv.size(1)).expand_dims(2) > seen.expand_dims(1)
    values = body.where(cached.expand_dims(1), values, np.float32(0))

    group = body.concat(np.array([0], np.int64), kv_heads, np.array([-1], np.int64), qkv.size(1), head_dim, axis=0)
    grouped = body.op("Reshape", q.cast(FLOAT32), group)  # [batch, kv_heads, group, query, head_dim]
    scale = body.op("Constant", value_float=body.attribute("scale", ir.AttributeType.FLOAT, "value_float"))
    transposed = body.op("Transpose", keys.expand_dims(2), perm=[0, 1, 2, 4, 3])
    scores = body.op("MatMul", grouped * scale, transposed)
    scores = body.where(visible.expand_dims(1, 2), scores, np.float32(-np.inf))
    mixed = body.op("MatMul", body.op("Softmax", scores, axis=-1), values.expand_dims(2))
    split = body.concat(np.array([0], np.int64), heads, qkv.size(1), head_dim, axis=0)
    turned = body.op("Transpose", body.op("Reshape", mixed, split), perm=[0, 2, 1, 3])
    joined = body.op("Reshape", turned, np.array([0, 0, -1], np.int64))
    return body.function(
        mixed=body.op("CastLike", joined, qkv), present_key_cache=present_key, present_value_cache=present_value
    )


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (window_attention(qk_norm="q_norm" in given),)


def _integer(body: Body, name: str) -> Tensor:
    """An integer attribute as int64 [1]."""
    reference = body.attribute(name, ir.AttributeType.INT, "value_int")
    return body.op("Constant", value_int=reference).expand_dims(0)
