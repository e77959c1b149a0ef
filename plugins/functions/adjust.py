"""``adjust_logits`` in standard operators."""

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, Body, BodyValue


def adjust_logits(dtype: str) -> ir.Function:
    """Return the function for logits of ``dtype``; inputs and output as in the reference.

    The output may share the memory of the logits. Unused columns of a request repeat its first one, so that several
    writes to one token write the same value.
    """
    body = Body.of("adjust_logits")
    logits, draft, tokens, counts, in_prompt, bias, length, *penalties = body.inputs
    presence, frequency, repetition = (penalty.expand_dims(1, 2) for penalty in penalties)
    largest = np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    listed = length.expand_dims(1)
    used_column = body.arange(tokens.size(1)) < listed.cast(INT64)

    def per_entry(values: BodyValue) -> BodyValue:  # [batch, 1, entries]
        return body.where(used_column, values, values.first(np.array([1], np.int64), 1)).expand_dims(1)

    inside = body.op("Max", body.op("Min", tokens.cast(INT64), logits.size(-1) - np.int64(1)), np.int64(0))
    token = per_entry(inside)
    drafted = draft.expand_dims(2).equals(token).cast(FLOAT32)  # [batch, rows - 1, entries]
    none = body.op("Sub", token, token).cast(FLOAT32)
    before = body.op("CumSum", body.concat(none, drafted, axis=1), np.int64(1))
    count = per_entry(counts).cast(FLOAT32) + before  # [batch, rows, entries]
    appears = count > np.float32(0)

    index = body.op("Expand", token, body.op("Shape", count))
    old = logits.at_last(index).cast(FLOAT32)
    biased = old + per_entry(bias)
    repeated = body.where(biased > np.float32(0), biased / repetition, biased * repetition)
    penalized = body.where(appears | (per_entry(in_prompt) > np.int32(0)), repeated, biased)
    new = penalized - (frequency * count + presence * appears.cast(FLOAT32))
    kept = body.op("Min", body.op("Max", new, -largest), largest)
    finite = body.op("Abs", old) < np.float32(np.inf)
    changed = body.where(finite & (listed.expand_dims(1) > np.int32(0)), kept, old)
    updates = body.op("CastLike", changed, logits)
    return body.function(adjusted=body.op("ScatterElements", logits, index, updates, axis=-1))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (adjust_logits(dtype),)
