"""Experts with weights of 4 or 8 bits in standard operators; see plugins/reference/low_bit_experts.py."""

from collections.abc import Collection
from functools import partial

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import Body, BodyValue
from tandemrt.plugins.functions.experts import mixture
from tandemrt.plugins.functions.float4 import float4_values
from tandemrt.plugins.functions.float8 import NUMBERS
from tandemrt.plugins.functions.int4 import in_groups, int4_values, scaled_groups
from tandemrt.plugins.functions.int8 import bytes_from_tiles, int8_values

_GROUPS = ("gate_up_group", "down_group")


def low_bit_experts(numbers: str, *, zeros: bool = False, overload: str = "") -> ir.Function:
    """Return the function of the operator for weights of ``numbers``; ``zeros``, ``overload``: as for int4_matmul."""
    without = () if zeros or numbers != "int4" else ("gate_up_zeros", "down_zeros")
    body = Body.of(f"{numbers}_experts", without=without)
    x, router_logits, *stored = body.inputs  # both weights, both scales, and what else describes them
    width = body.op("Div", stored[0].size(0), router_logits.size(-1) * np.int64(2))
    both, last = (
        _values(numbers, body, stored[at::2], group).first(inner, 1)
        for at, group, inner in zip((0, 1), _GROUPS, (x.size(-1), width), strict=True)
    )
    return body.function(overload, mixed=mixture(body, x, router_logits, both, last))


def _values(numbers: str, body: Body, stored: list[BodyValue], group: str) -> BodyValue:
    """Return the values of a weight, float32 [width, padded]."""
    weight, scales, *more = stored
    if numbers == "int4":
        return int4_values(body, weight, scales, more[0] if more else None, group)
    if numbers == "int8":
        return int8_values(body, weight, scales, group)
    if numbers == "float4":
        return float4_values(body, weight, scales, group) * more[0].expand_dims(1)
    codes = in_groups(body, bytes_from_tiles(body, weight), group).cast(ir.DataType.INT32)
    return scaled_groups(body, body.op("Gather", NUMBERS, codes), scales)


def _bodies(numbers: str, dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (low_bit_experts(numbers, zeros="gate_up_zeros" in present),)


int4_bodies, int8_bodies, float4_bodies, float8_bodies = (
    partial(_bodies, numbers) for numbers in ("int4", "int8", "float4", "float8")
)
