"""``token_bitmask`` in standard operators."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import BOOL, FLOAT32, UINT32, Body, BodyValue


def token_bitmask() -> ir.Function:
    """(logits floating [..., vocab], bitmask int32 [..., words]) → logits of that dtype, −inf where the bit is 0."""
    body = Body.of("token_bitmask")
    logits, bitmask = body.inputs

    def masked() -> list[BodyValue]:
        bits = (bitmask.cast(UINT32).expand_dims(-1) >> np.arange(32, dtype=np.uint32)).bits_and(np.uint32(1))
        rows = body.op("Shape", bitmask, end=-1)
        allowed = body.op("Reshape", bits.cast(BOOL), body.concat(rows, np.array([-1], np.int64), axis=0))
        kept = body.where(allowed.first(logits.size(-1), -1), logits.cast(FLOAT32), np.float32(-np.inf))
        return [body.op("CastLike", kept, logits)]

    # Batches without constraints are common; they cost only one pass over the mask words.
    open_words = bitmask.equals(np.int32(-1))
    [result] = body.branch((~open_words).any(), masked, lambda: [logits])
    return body.function(masked=result)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (token_bitmask(),)
