"""``int4_experts``, ``int8_experts``, ``float4_experts``, ``float8_experts``: experts with weights of 4 or 8 bits.

Inputs and attributes are those of ``experts``, and for each weight those of the matmul with its numbers (int4_matmul,
int8_matmul, float4_matmul). The weights of all experts are concatenated. float8_e4m3fn, in the order of int8_matmul,
has float32 scales per 128 inputs: both groups are 128.
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


def _experts(
    numbers: str,
    x: np.ndarray,
    router_logits: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_scales: np.ndarray,
    down_scales: np.ndarray,
    gate_up_zeros: np.ndarray | None = None,
    down_zeros: np.ndarray | None = None,
    gate_up_factors: np.ndarray | None = None,
    down_factors: np.ndarray | None = None,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    expert_factors: np.ndarray | None = None,
    prompt_rows: np.ndarray | None = None,  # noqa: ARG001
    *,
    per_token: int,
    normalized: int,
    shared_columns: int = 0,
    interleaved: int = 0,
    alpha: float = 1.0,
    cubic: float = 0.0,
    limit: float = 0.0,
    offset: float = 0.0,
    gate_up_group: int,
    down_group: int,
) -> np.ndarray:
    """Return the mixture for weights of ``numbers``."""
    experts_in_all = router_logits.shape[-1] - shared_columns + bool(shared_columns)
    width = len(gate_up) // (2 * experts_in_all)
    weights: list[np.ndarray] = []
    for weight, inner, group, *described in (
        (gate_up, x.shape[-1], gate_up_group, gate_up_scales, gate_up_zeros, gate_up_factors),
        (down, width, down_group, down_scales, down_zeros, down_factors),
    ):
        more = [each for each in described if each is not None]
        weights.append(VALUES[numbers](weight, *more, group_size=group)[:, :inner])  # padded after the inputs
    return experts(
        x,
        router_logits,
        weights[0],
        weights[1],
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        expert_factors=expert_factors,
        per_token=per_token,
        normalized=normalized,
        shared_columns=shared_columns,
        interleaved=interleaved,
        alpha=alpha,
        cubic=cubic,
        limit=limit,
        offset=offset,
    )


int4_experts, int8_experts, float4_experts, float8_experts = (
    partial(_experts, numbers) for numbers in ("int4", "int8", "float4", "float8")
)
