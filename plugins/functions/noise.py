"""``position_noise`` and the accept coin in standard operators: Philox4x32-10 in uint64 arithmetic."""

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, UINT64, Body, BodyValue
from tandemrt.plugins.operators.constants import Purpose

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def position_noise() -> ir.Function:
    """(seed, position, purpose int64 [...], vocab int64 [1]) → Gumbel noise float32 [..., vocab]."""
    body = Body("position_noise", ["seed", "position", "purpose", "vocab"])
    seed, position, purpose, vocab = body.inputs
    blocks = body.op("Div", vocab + np.int64(3), np.int64(4))
    words = _philox(
        body.arange(blocks).cast(UINT64), seed.expand_dims(-1), position.expand_dims(-1), purpose.expand_dims(-1)
    )
    bits = body.concat(*(word.expand_dims(-1) for word in words), axis=-1)
    rows = body.op("Shape", bits, end=-2)
    flat = body.op("Reshape", bits, body.concat(rows, np.array([-1], np.int64), axis=0)).first(vocab, -1)
    return body.function(noise=_gumbel(flat))


def token_noise() -> ir.Function:
    """(seed, position, purpose int64 [...], ids int32 [tokens]) → the noise of these tokens, float32 [..., tokens]."""
    body = Body("token_noise", ["seed", "position", "purpose", "ids"])
    seed, position, purpose, ids = body.inputs
    token = ids.cast(UINT64)
    words = _philox(token >> np.uint64(2), seed.expand_dims(-1), position.expand_dims(-1), purpose.expand_dims(-1))
    lane, bits = token.bits_and(np.uint64(3)).cast(INT64), words[3].cast(INT64)
    for at, word in enumerate(words[:3]):
        bits = body.where(lane.equals(np.int64(at)), word.cast(INT64), bits)
    return body.function(noise=_gumbel(bits.cast(UINT64)))


def accept_coin() -> ir.Function:
    """(seed, position int64 [...]) → uniforms in (0, 1), float64 [...]."""
    body = Body("accept_coin", ["seed", "position"])
    seed, position = body.inputs
    zero = body.op("Sub", position, position).cast(UINT64)
    words = _philox(zero, seed, position, zero + np.uint64(Purpose.ACCEPT))
    return body.function(coin=_uniform(words[0]))


def _philox(block: BodyValue, seed: BodyValue, position: BodyValue, purpose: BodyValue) -> tuple[BodyValue, ...]:
    key, place = seed.cast(UINT64), position.cast(UINT64)
    k0, k1 = key.bits_and(_LOW), key >> _HALF
    c0, c1, c2, c3 = block, place.bits_and(_LOW), place >> _HALF, purpose.cast(UINT64)
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (right >> _HALF).bits_xor(c1.bits_xor(k0)), (left >> _HALF).bits_xor(c3.bits_xor(k1))
        c1, c3 = right.bits_and(_LOW), left.bits_and(_LOW)
        k0, k1 = (k0 + _WEYL[0]).bits_and(_LOW), (k1 + _WEYL[1]).bits_and(_LOW)
    return c0, c1, c2, c3


def _gumbel(bits: BodyValue) -> BodyValue:
    return (-(-_uniform(bits).log()).log()).cast(FLOAT32)


def _uniform(bits: BodyValue) -> BodyValue:
    return ((bits >> np.uint64(8)).cast(FLOAT64) + np.float64(0.5)) * np.float64(2.0**-24)
