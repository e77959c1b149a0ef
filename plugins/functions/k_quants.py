"""``q4_k_matmul`` and ``q6_k_matmul`` in standard operators; see plugins/reference/k_quants.py."""

from collections.abc import Collection
from functools import partial

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue
from tandemrt.plugins.functions.int4 import from_tiles, matmul_of_values
from tandemrt.plugins.functions.int8 import bytes_from_tiles
from tandemrt.plugins.operators.k_quants_layout import BLOCK, K_QUANTS, KQuant


def k_quants_matmul(kind: str, *, prompt_rows: bool = False) -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``prompt_rows``: with that input."""
    body = Body.of(f"{kind}_matmul", without=() if prompt_rows else ("prompt_rows",))
    x, weight, scales, factors, *_ = body.inputs
    out = matmul_of_values(body, x, _values(body, K_QUANTS[kind], weight, scales, factors))
    return body.function(out=body.op("CastLike", out, x))


def _values(body: Body, quant: KQuant, weight: BodyValue, scales: BodyValue, factors: BodyValue) -> BodyValue:
    """Return the values of a weight, float32 [width, inner]."""

    def reshaped(value: BodyValue, *shape: int) -> BodyValue:
        return body.op("Reshape", value, np.array(shape, np.int64))

    numbers = reshaped(_integers(body, quant, weight), 0, -1, BLOCK // quant.group, quant.group).cast(FLOAT32)
    of_blocks = reshaped(factors.cast(FLOAT32), 0, -1, 1, 2 if quant.minima else 1)  # [width, blocks, 1, ...]
    if not quant.minima:
        of_groups = reshaped(scales.cast(FLOAT32), 0, -1, BLOCK // quant.group, 1) * of_blocks
        return reshaped((numbers - np.float32(128)) * of_groups, 0, -1)
    by_chunk = reshaped(scales.cast(FLOAT32), 0, -1, 2, 2, 4)  # block, chunk, scales and minima, group
    pairs = body.op("Transpose", by_chunk, perm=[0, 1, 2, 4, 3])
    of_groups = reshaped(pairs, 0, -1, BLOCK // quant.group, 2) * of_blocks
    multiplied, subtracted = (
        body.op("Slice", of_groups, *(np.array([each], np.int64) for each in (at, at + 1, 3))) for at in (0, 1)
    )
    return reshaped(numbers * multiplied - subtracted, 0, -1)


def _integers(body: Body, quant: KQuant, weight: BodyValue) -> BodyValue:
    """Return the integers in the order of the inputs, [width, ...]; see ``KQuant.integers``."""
    if quant.bits == 4:
        return from_tiles(body, weight)
    runs = body.op("Reshape", bytes_from_tiles(body, weight), np.array([0, -1, 4, 2, 4], np.int64))
    return body.op("Transpose", runs, perm=[0, 1, 3, 2, 4])


def _bodies(kind: str, dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (k_quants_matmul(kind, prompt_rows="prompt_rows" in present),)


q4_k_bodies, q6_k_bodies = (partial(_bodies, kind) for kind in K_QUANTS)
