"""Experts with weights of 4 or 8 bits in standard operators; see plugins/reference/low_bit_experts.py."""

from collections.abc import Collection
from functools import partial

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import Body, BodyValue
from tandemrt.plugins.functions.experts import mixture, routed_and_all
from tandemrt.plugins.functions.float4 import float4_values
from tandemrt.plugins.functions.float8 import NUMBERS
from tandemrt.plugins.functions.int4 import in_groups, int4_values, scaled_groups
from tandemrt.plugins.functions.int8 import bytes_from_tiles, int8_values


def low_bit_experts(numbers: str, present: Collection[str] = (), overload: str = "") -> ir.Function:
    """Return the function of the operator for weights of ``numbers``.

    ``present``, ``overload``: as for ``experts`` and int4_matmul.
    """
    body = Body.up_to(f"{numbers}_experts", present)
    _, count = routed_and_all(body)
    width = body.op("Div", body["gate_up"].size(0), count * np.int64(2))
    both, last = (
        _values(numbers, body, name, present).first(inner, 1)
        for name, inner in (("gate_up", body["x"].size(-1)), ("down", width))
    )
    return body.function(overload, mixed=mixture(body, present, both, last))


def _values(numbers: str, body: Body, name: str, present: Collection[str]) -> BodyValue:
    """Return the values of the weight ``name``, float32 [width, padded]."""
    weight, scales, group = body[name], body[f"{name}_scales"], f"{name}_group"
    if numbers == "int4":
        return int4_values(body, weight, scales, body[f"{name}_zeros"] if f"{name}_zeros" in present else None, group)
    if numbers == "int8":
        return int8_values(body, weight, scales, group)
    if numbers == "float4":
        return float4_values(body, weight, scales, group) * body[f"{name}_factors"].expand_dims(1)
    codes = in_groups(body, bytes_from_tiles(body, weight), group).cast(ir.DataType.INT32)
    return scaled_groups(body, body.op("Gather", NUMBERS, codes), scales)


def _bodies(numbers: str, dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (low_bit_experts(numbers, present),)


int4_bodies, int8_bodies, float4_bodies, float8_bodies = (
    partial(_bodies, numbers) for numbers in ("int4", "int8", "float4", "float8")
)
