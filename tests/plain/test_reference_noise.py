"""position_noise is a pure function of seed, position, purpose and token."""

import numpy as np
import pytest

from tandemrt.plugins.operators.constants import Purpose
from tandemrt.plugins.reference import accept_coin, philox4x32, position_bits, position_noise
from tandemrt.plugins.reference.noise import token_noise

SMALLEST_COIN_SEED = 3313741  # at position 0, found by search
LARGEST_COIN_SEED = 15626855


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, words):
    """Known-answer vectors of Random123 for philox4x32, 10 rounds."""
    np.testing.assert_array_equal(philox4x32(counter, key), words)


def test_seed_position_purpose_and_token_fill_key_and_counter():
    seed, position, token = 0xFEDCBA9876543210, 0x123456789, 4 * 57 + 2
    block = philox4x32([57, 0x23456789, 0x1, Purpose.DRAFT], [0x76543210, 0xFEDCBA98])
    assert position_bits(seed, position, Purpose.DRAFT, 1000)[token] == block[2]


def test_a_seed_is_64_bits_signed_or_not():
    signed = np.array([-1, 2**63 - 1, -(2**63)], np.int64)
    unsigned = [2**64 - 1, 2**63 - 1, 2**63]
    np.testing.assert_array_equal(
        position_bits(signed, 5, Purpose.SAMPLE, 9), position_bits(unsigned, 5, Purpose.SAMPLE, 9)
    )


def test_the_noise_of_some_tokens_is_that_of_all() -> None:
    tokens = np.flatnonzero(np.random.default_rng(0).random(1000) < 0.4)
    for seed in (-1, 2**63 - 1, -(2**63)):
        for position in (0, 2**40 + 3):
            expected = position_noise(seed, position, Purpose.DRAFT, 1000)[tokens]
            np.testing.assert_array_equal(token_noise(seed, position, Purpose.DRAFT, tokens), expected)


def test_a_token_has_the_same_noise_in_every_vocabulary_and_batch():
    wide = position_noise([3, 7], [[10], [11]], Purpose.SAMPLE, 2049)
    assert wide.shape == (2, 2, 2049)
    np.testing.assert_array_equal(position_noise(7, 11, Purpose.SAMPLE, 31), wide[1, 1, :31])


def test_noise_streams_are_distinct():
    """Draft, coin, residual and sample of one position are different draws, as are neighbouring seeds and positions."""
    streams = [position_bits(1, 2, purpose, 1000) for purpose in Purpose]
    streams += [position_bits(2, 2, Purpose.SAMPLE, 1000), position_bits(1, 3, Purpose.SAMPLE, 1000)]
    streams += [position_bits(1 << 32, 2, Purpose.SAMPLE, 1000), position_bits(1, 2 << 32, Purpose.SAMPLE, 1000)]
    assert len(np.unique(np.concatenate(streams))) == 8000


def test_the_noise_is_standard_gumbel():
    noise = np.sort(position_noise(11, np.arange(1000), Purpose.SAMPLE, 1000).ravel().astype(np.float64))
    empirical = (np.arange(noise.size) + 0.5) / noise.size
    assert np.abs(np.exp(-np.exp(-noise)) - empirical).max() < 1.95 / np.sqrt(noise.size)  # Kolmogorov, 0.1 %


def test_the_extreme_coins_are_inside_the_open_interval():
    """The smallest uniform is above 0, the largest is below 1, and the noise of both is finite."""
    assert accept_coin(SMALLEST_COIN_SEED, 0) == 2.0**-25
    assert accept_coin(LARGEST_COIN_SEED, 0) == 1 - 2.0**-25
    assert np.float32(1 - 2.0**-25) == 1  # the reason for float64 in the coin and the noise
    noise = position_noise([SMALLEST_COIN_SEED, LARGEST_COIN_SEED], 0, Purpose.ACCEPT, 1)[:, 0]
    np.testing.assert_allclose(noise, [-2.852, 17.329], atol=1e-3)
