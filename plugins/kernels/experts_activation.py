"""The activation between the two matmuls of experts on a GPU, as kernels take it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.plugins.operators.constants import ACTIVATIONS
from tandemrt.plugins.operators.launch import Tensors

_NUMBERS = ("alpha", "cubic", "limit", "offset")


def activation_of(tensors: Tensors, attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of kernels: the bias of gates and ups, their order, and the numbers of the function."""
    numbers = (np.float32(attributes[name]) for name in _NUMBERS)
    return tensors.get("gate_up_bias"), np.int32(attributes["interleaved"]), *numbers


def is_swiglu(tensors: Tensors, attributes: Mapping[str, Any]) -> bool:
    """Return whether the activation is that of the operator ``swiglu``: no bias, gates first, and silu."""
    plain = "gate_up_bias" not in tensors and not attributes["interleaved"]
    return plain and all(attributes[name] == ACTIVATIONS["silu"][name] for name in _NUMBERS)
