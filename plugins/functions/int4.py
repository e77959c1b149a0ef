"""``int4_product`` in standard operators; see plugins/reference/int4.py."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, Tensor

_HALF, _LEFT = np.uint8(15), np.uint8(4)


def int4_product(*, zeros: bool, overload: str = "") -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``zeros``: with zero points.

    ``overload`` is ONNX's: which of the functions of this name the nodes mean that give it.
    """
    body = Body.of("int4_product", without=() if zeros else ("zeros",))
    x, weight, scales, *given = body.inputs
    block = body.op("Constant", value_int=body.attribute("block", ir.AttributeType.INT, "value_int"))
    words = body.op("Reshape", _halves(body, weight), np.array([0, -1, 4, 4, 2, 4], np.int64))
    by_block = body.concat(np.array([0, -1], np.int64), body.op("Reshape", block, np.array([1], np.int64)), axis=0)
    in_order = body.op("Transpose", words, perm=[0, 1, 3, 2, 5, 4])
    integers = body.op("Reshape", in_order, by_block).cast(FLOAT32)
    blocks = integers.size(1)
    middles = _middles(body, given[0], blocks) if given else np.float32(8)
    numbers = (integers - middles) * scales.first(blocks, 1).cast(FLOAT32).expand_dims(-1)
    wide = body.op("Reshape", numbers, np.array([0, -1], np.int64)).first(x.size(-1), 1)
    product = body.op("MatMul", x.cast(FLOAT32), body.op("Transpose", wide, perm=[1, 0]))
    return body.function(overload, product=body.op("CastLike", product, x))


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (int4_product(zeros="zeros" in given),)


def _middles(body: Body, zeros: Tensor, blocks: Tensor) -> Tensor:
    flat = body.op("Reshape", _halves(body, zeros), np.array([0, -1], np.int64))
    return flat.first(blocks, 1).cast(FLOAT32).expand_dims(-1)


def _halves(body: Body, packed: Tensor) -> Tensor:
    """The integers of 4 bits, the low half of a byte first: uint8 [..., bytes] to [..., bytes, 2]."""
    low, high = packed.bits_and(_HALF), packed >> _LEFT
    return body.concat(low.expand_dims(-1), high.expand_dims(-1), axis=-1)
