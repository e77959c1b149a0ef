"""``all_reduce`` and ``all_gather`` of one process in standard operators: the sum and the columns of its only rank."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import Body


def all_reduce_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the function of ``all_reduce``; see Function in plugins/operators/launch.py."""
    body = Body.of("all_reduce")
    (x,) = body.inputs
    return (body.function(sum=body.op("Identity", x)),)


def all_gather_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the function of ``all_gather``; see Function in plugins/operators/launch.py."""
    body = Body.of("all_gather")
    (x,) = body.inputs
    return (body.function(gathered=x.first(body.integer("width"), axis=-1)),)
