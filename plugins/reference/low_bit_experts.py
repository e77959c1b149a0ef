"""``int4_experts``, ``int8_experts``, ``float4_experts``, ``float8_experts``: experts with weights of 4 or 8 bits.

Inputs and attributes are those of ``experts``, and for each weight those of the matmul with its numbers (int4_matmul,
int8_matmul, float4_matmul). The weights of all experts are concatenated, gates before ups.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from tandemrt.plugins.operators.float8 import FLOAT8
from tandemrt.plugins.operators.int8_layout import bytes_from_tiles
from tandemrt.plugins.reference.experts import experts
from tandemrt.plugins.reference.float4 import float4_values
from tandemrt.plugins.reference.int4 import int4_values
from tandemrt.plugins.reference.int8 import int8_values


def int4_experts(
    x: np.ndarray,
    router_logits: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_scales: np.ndarray,
    down_scales: np.ndarray,
    gate_up_zeros: np.ndarray | None = None,
    down_zeros: np.ndarray | None = None,
    *,
    per_token: int,
    normalized: int,
    gate_up_group: int,
    down_group: int,
) -> np.ndarray:
    """Return the mixture for weights of 4-bit integers."""
    both = int4_values(gate_up, gate_up_scales, gate_up_zeros, group_size=gate_up_group)
    last = int4_values(down, down_scales, down_zeros, group_size=down_group)
    return _mixture(x, router_logits, both, last, per_token, normalized)


def float4_experts(
    x: np.ndarray,
    router_logits: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_scales: np.ndarray,
    down_scales: np.ndarray,
    gate_up_factors: np.ndarray,
    down_factors: np.ndarray,
    *,
    per_token: int,
    normalized: int,
    gate_up_group: int,
    down_group: int,
) -> np.ndarray:
    """Return the mixture for weights of 4-bit floats."""
    both = float4_values(gate_up, gate_up_scales, gate_up_factors, gate_up_group)
    last = float4_values(down, down_scales, down_factors, down_group)
    return _mixture(x, router_logits, both, last, per_token, normalized)


def float8_values(weight: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """Return the values of a weight, float64 [width, padded]."""
    numbers: np.ndarray = bytes_from_tiles(weight).view(FLOAT8).astype(np.float64)
    return numbers * scales.astype(np.float64).repeat(group_size, axis=1)


# The values of a weight by its numbers: float64 [width, padded]
VALUES: Mapping[str, Callable[..., np.ndarray]] = {
    "int4": int4_values,
    "int8": int8_values,
    "float4": float4_values,
    "float8": float8_values,
}


def _scaled_experts(
    values: Callable[..., np.ndarray],
    x: np.ndarray,
    router_logits: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_scales: np.ndarray,
    down_scales: np.ndarray,
    *,
    per_token: int,
    normalized: int,
    gate_up_group: int,
    down_group: int,
) -> np.ndarray:
    """Return the mixture for weights that nothing but scales describes; ``values`` of numbers, scales and a group."""
    both, last = values(gate_up, gate_up_scales, gate_up_group), values(down, down_scales, down_group)
    return _mixture(x, router_logits, both, last, per_token, normalized)


# float8_e4m3fn, in the order of int8_matmul, has float32 scales per 128 inputs: both groups are 128.
int8_experts, float8_experts = partial(_scaled_experts, int8_values), partial(_scaled_experts, float8_values)


def _mixture(
    x: np.ndarray, router_logits: np.ndarray, gate_up: np.ndarray, down: np.ndarray, per_token: int, normalized: int
) -> np.ndarray:
    """Return the mixture by values that are padded after the inputs."""
    width = len(gate_up) // (2 * router_logits.shape[-1])
    weights = gate_up[:, : x.shape[-1]], down[:, :width]
    return experts(x, router_logits, *weights, per_token=per_token, normalized=normalized)
