"""The rules that extend rotary embedding beyond the length of the first training."""

import math

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields, is_number

Floats = npt.NDArray[np.float32]


def powers(theta: float, rotated: int) -> Floats:
    """Return theta to the exponents 0, 2 / rotated, 4 / rotated and so on, which are rounded to float32, too."""
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    result: Floats = (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    return result


def llama3(fields: Fields, kept: Floats, max_length: int) -> Floats:
    """Llama 3.1: stretch long waves by the factor, keep short waves, and blend between the two bounds."""
    factor, low, high = (fields.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = fields.integer("original_max_position_embeddings", max_length)
    wave = np.float32(2 * math.pi) / kept
    stretched = np.where(wave > original / low, kept / factor, kept)
    share = (original / wave - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = ~(wave < original / high) & ~(wave > original / low)
    return np.where(between, blended, stretched)


def yarn(
    fields: Fields, kept: Floats, theta: float, max_length: int, *, sharpening: float
) -> tuple[Floats, float, int]:
    """YaRN (arXiv 2309.00071): blend stretched and kept frequencies by a ramp over the dimensions.

    Returns the frequencies, the magnitude, which sharpens attention, and the extended length.
    """
    original = fields.integer("original_max_position_embeddings", max_length)
    factor = fields.number("factor", max_length / original)
    half, dim = len(kept), 2 * len(kept)

    def turns(count: float) -> float:  # the dimension with `count` rotations over the original length
        return dim * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta))

    first, last = turns(fields.number("beta_fast", 32.0)), turns(fields.number("beta_slow", 1.0))
    if fields.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    ramp = (np.arange(half, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    share = 1 - ramp.clip(0, 1)
    stretched = np.reciprocal(np.float32(factor) * powers(theta, dim))
    return stretched * (1 - share) + kept * share, _yarn_magnitude(fields, factor, sharpening), int(original * factor)


def _yarn_magnitude(fields: Fields, factor: float, sharpening: float) -> float:
    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else sharpening * scale * math.log(factor) + 1.0

    above, below = fields.get("mscale"), fields.get("mscale_all_dim")
    default = of(above) / of(below) if above and below else of(1.0)
    return fields.number("attention_factor", default)


def longrope(config: Fields, fields: Fields, waves: Floats, max_length: int, length: int) -> tuple[Floats, float]:
    """LongRoPE (arXiv 2402.13753): one factor per frequency, with separate lists for short and for long texts.

    ``waves`` are the inverse frequencies. The ``length`` of the longest text selects the list once, because cached keys
    cannot be rotated again. Returns the frequencies and the magnitude.
    """
    original = fields.integer(
        "original_max_position_embeddings", config.integer("original_max_position_embeddings", max_length)
    )
    lists = [fields.get(name) for name in ("short_factor", "long_factor")]
    for name, factors in zip(("short_factor", "long_factor"), lists, strict=True):
        numbers = isinstance(factors, list) and all(is_number(x) and x > 0 for x in factors)
        if not numbers or len(factors) != len(waves):
            rule = f"{name} should be {len(waves)} numbers above 0, one for each rotated pair"
            raise BadCheckpoint(f"{fields.where}: {rule}, it is {quoted(factors)}")
    factor = fields.number("factor", max_length / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = np.array(lists[length > original], np.float32)
    magnitudes = [fields.number(name, default) for name in ("short_mscale", "long_mscale")]  # Phi-3.5-MoE
    return np.reciprocal(chosen * waves), fields.number("attention_factor", magnitudes[length > original])
