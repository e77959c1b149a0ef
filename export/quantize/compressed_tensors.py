"""Make the ``quantization_config`` of a checkpoint in the compressed-tensors format."""

from collections.abc import Sequence
from typing import Any, Literal

SchemeName = Literal["fp8", "int4"]


def quantization_config(scheme: SchemeName, group: int, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """Return the config of ``scheme``, with ``group`` inputs per int4 scale; modules ``unquantized`` are ignored."""
    symmetric = {"symmetric": True, "dynamic": False}
    if scheme == "fp8":
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", **symmetric}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    else:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, **symmetric}
        inputs = None
    stored = "float-quantized" if scheme == "fp8" else "pack-quantized"
    form = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**form, "format": stored}},
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
    }
