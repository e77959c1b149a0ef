"""``position_noise``: Gumbel noise as a pure function of (seed, position, purpose, token).

There is no state: a draw depends on neither batch, order nor restarts. The generator is Philox4x32 with ten
rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import Purpose

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def position_noise(
    seed: npt.ArrayLike, position: npt.ArrayLike, purpose: npt.ArrayLike, vocab: int
) -> npt.NDArray[np.float32]:
    """Return standard Gumbel noise, float32 [..., vocab]; the three keys broadcast to [...].

    ``seed`` is an unsigned 64-bit integer or the int64 that holds its bits; ``position`` counts tokens of prompt plus
    output; ``purpose`` is a :class:`Purpose`. With n the top 24 bits of a Philox word, u = (n + 0.5) · 2⁻²⁴ and g =
    −ln(−ln u). Both are evaluated in float64, because float32 would round a u close to 1 to 1, and the noise to
    infinity. g is rounded to float32 once. It lies in [−2.86, 17.33].
    """
    return _gumbel(_uniform(position_bits(seed, position, purpose, vocab)))


def token_noise(seed: int, position: int, purpose: int, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Return the values of ``position_noise`` for some ``tokens``, which ascend; the keys are single integers."""
    blocks = tokens // 4
    first = np.diff(blocks, prepend=-1) > 0
    counter = np.empty((np.count_nonzero(first), 4), np.uint64)
    counter[:, 0] = blocks[first]
    counter[:, 1:] = position & 0xFFFFFFFF, position >> 32, purpose
    bits = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return _gumbel(_uniform(bits[np.cumsum(first) - 1, tokens % 4]))


def accept_coin(seed: npt.ArrayLike, position: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the uniform in (0, 1) of the acceptance test at a position: token 0 of the stream ACCEPT.

    It has 25 significant bits, so ``coin * q`` is exact in float64 for any float32 ``q``.
    """
    return _uniform(position_bits(seed, position, Purpose.ACCEPT, 1)[..., 0])


def position_bits(
    seed: npt.ArrayLike, position: npt.ArrayLike, purpose: npt.ArrayLike, vocab: int
) -> npt.NDArray[np.uint32]:
    """Return 32 random bits per token, uint32 [..., vocab].

    Philox key = (seed low, seed high); counter = (token // 4, position low, position high, purpose); token % 4 selects
    the word of the result.
    """
    key, place, purpose = np.broadcast_arrays(unsigned(seed), unsigned(position), np.asarray(purpose))
    blocks = np.arange((vocab + 3) // 4, dtype=np.uint64)
    counter = np.stack(np.broadcast_arrays(blocks, *_words(place), purpose.astype(np.uint64)[..., None]), axis=-1)
    bits = philox4x32(counter, np.stack(_words(key), axis=-1))
    return bits.reshape(*key.shape, 4 * len(blocks))[..., :vocab]


def philox4x32(counter: npt.ArrayLike, key: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Encrypt counters [..., 4] with keys [..., 2] of 32-bit words by ten rounds of Philox4x32; uint32 [..., 4]."""
    counters, keys = (np.moveaxis(np.asarray(words, dtype=np.uint64), -1, 0) for words in (counter, key))
    # The longer axis is the inner one: numpy's loops over few elements are slow.
    order: Literal["C", "F"] = "F" if counters.shape[-1] ** 2 < counters[0].size else "C"
    c0, c1, c2, c3 = (np.array(words, order=order) for words in counters)
    k0, k1 = (np.array(words, order=order) for words in keys)
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def unsigned(value: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return the 64 bits of integers as uint64, in two's complement for negative ones."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return value.astype(np.uint64)
    # Through Python integers: numpy would turn a list that mixes negative and huge values into float64.
    exact = np.asarray(value, dtype=object)
    return np.array([int(item) & (2**64 - 1) for item in exact.ravel()], dtype=np.uint64).reshape(exact.shape)


def _uniform(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    return np.asarray(((bits >> np.uint32(8)) + np.float64(0.5)) * 2.0**-24)


def _gumbel(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return (-np.log(-np.log(u))).astype(np.float32)


def _words(value: npt.NDArray[np.uint64]) -> tuple[np.ndarray, np.ndarray]:
    return (value & _LOW)[..., None], (value >> _HALF)[..., None]
