"""Rotary position embedding: the frequencies of each scaling rule, bit for bit those of ``transformers``.

float32 arithmetic is part of the definition: models were trained with these roundings, and at position 100,000 a
last bit of a frequency is a visible angle.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields


@dataclass(frozen=True)
class Rope:
    """``frequencies``: radians per position, float32[head_dim // 2]; ``magnitude`` multiplies cosine and sine.

    ``stretched_to``: tokens that YaRN makes positions for, which configs often do not say otherwise; 0: not stretched.
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    stretched_to: int = 0

    @classmethod
    def from_hf(cls, config: Fields, head_dim: int, max_length: int) -> "Rope":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (earlier).

        Raises BadCheckpoint for a rule other than default, linear, llama3 and yarn, and for unknown parameters.
        """
        both = [config.get("rope_parameters", {}), config.get("rope_scaling", {})]
        if not all(isinstance(part, Mapping) for part in both):
            raise BadCheckpoint(f"{config.where}: rope_parameters should be an object, it is {quoted(both)}")
        merged: dict[str, Any] = {**both[1], **both[0]}
        merged.setdefault("rope_theta", config.get("rope_theta"))
        fields = Fields(merged, f"{config.where}, rope_parameters")
        config.only("partial_rotary_factor", 1.0)
        fields.only("partial_rotary_factor", 1.0)
        kind = fields.get("rope_type", fields.get("type", "default"))
        fields.skip("type")
        theta = fields.number("rope_theta", 10_000.0)
        kept = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        magnitude, stretched_to = 1.0, 0
        match kind:
            case "default":
                frequencies = kept
            case "linear":
                frequencies = kept / fields.number("factor")
            case "llama3":
                frequencies = _llama3(fields, kept, max_length)
            case "yarn":
                try:
                    frequencies, magnitude, stretched_to = _yarn(fields, kept, theta, max_length)
                except (ArithmeticError, TypeError, ValueError) as error:
                    raise BadCheckpoint(
                        f"{fields.where}: the values must make sense for yarn, they give: {error}"
                    ) from error
            case _:
                raise BadCheckpoint(
                    f"{fields.where}: rope_type is {quoted(kind)}, which the exporter does not implement; "
                    "supported: default, linear, llama3, yarn"
                )
        fields.finish()
        return cls(kind, theta, tuple(frequencies.tolist()), magnitude, stretched_to)


def _llama3(fields: Fields, kept: torch.Tensor, max_length: int) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = (fields.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = fields.integer("original_max_position_embeddings", max_length)
    wave = 2 * math.pi / kept
    stretched = torch.where(wave > original / low, kept / factor, kept)
    share = (original / wave - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = ~(wave < original / high) & ~(wave > original / low)
    return torch.where(between, blended, stretched)


def _yarn(fields: Fields, kept: torch.Tensor, theta: float, max_length: int) -> tuple[torch.Tensor, float, int]:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions between stretched and kept, and a sharper attention.

    Returns frequencies, magnitude and the length that it stretches to.
    """
    original = fields.integer("original_max_position_embeddings", max_length)
    factor = fields.number("factor", max_length / original)
    half, dim = len(kept), 2 * len(kept)

    def turns(count: float) -> float:  # the dimension that turns `count` times within the original length
        return dim * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta))

    first, last = turns(fields.number("beta_fast", 32.0)), turns(fields.number("beta_slow", 1.0))
    if fields.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    share = 1 - ((torch.arange(half, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    stretched = 1.0 / (factor * (theta ** (torch.arange(0, dim, 2).float() / dim)))
    return stretched * (1 - share) + kept * share, _yarn_magnitude(fields, factor), int(original * factor)


def _yarn_magnitude(fields: Fields, factor: float) -> float:
    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    above, below = fields.get("mscale"), fields.get("mscale_all_dim")
    default = of(above) / of(below) if above and below else of(1.0)
    return fields.number("attention_factor", default)
