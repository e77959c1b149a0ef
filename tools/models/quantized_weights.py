"""Quantize matmul weights in the compressed-tensors format, on any device, with its fields of config.json."""

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tools.bench.agreement import Weights

GROUP = 128  # inputs per scale in 4 bits, as in published checkpoints
_LARGEST = 448.0  # largest float8_e4m3fn
_MATMULS = ("_proj.weight", "lm_head.weight")
_AT_ONCE = 8192  # rows at a time: an lm_head in float32 is 2 GB


class WeightFormat(StrEnum):
    """Format of matmul weights.

    ``unquantized``: the compute dtype. ``fp8``: float8 with a scale per output channel. ``int4``: a scale per GROUP
    inputs.
    """

    UNQUANTIZED = "unquantized"
    FP8 = "fp8"
    INT4 = "int4"


def quantize_matmuls(weights: Weights, weight_format: WeightFormat) -> Weights:
    """Return ``weights`` with all matmuls, the lm_head too, in ``weight_format``; other tensors are unchanged."""
    if weight_format is WeightFormat.UNQUANTIZED:
        return weights
    quantize = _in_float8 if weight_format is WeightFormat.FP8 else _in_int4
    quantized: Weights = {}
    for name, tensor in weights.items():
        quantized |= quantize(name, tensor) if name.endswith(_MATMULS) else {name: tensor}
    return quantized


def write_quantization_config(folder: Path, weight_format: WeightFormat, unquantized: Sequence[str] = ()) -> None:
    """Add the quantization config to config.json.

    ``unquantized``: names of modules that are not quantized. In float8 inputs have a scale per token.
    """
    if weight_format is WeightFormat.UNQUANTIZED:
        return
    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    if weight_format is WeightFormat.INT4:
        integer = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        group = {"targets": ["Linear"], "weights": integer, "input_activations": None}
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if weight_format is WeightFormat.INT4 else "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
    }
    path.write_text(json.dumps(config, indent=2))


def _in_float8(name: str, tensor: torch.Tensor) -> Weights:
    scales = (tensor.abs().amax(1, keepdim=True).float() / _LARGEST).clamp(min=2.0**-100)
    numbers = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    for rows in _parts(tensor):
        numbers[rows] = (tensor[rows].float() / scales[rows]).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale": scales}


def _in_int4(name: str, tensor: torch.Tensor) -> Weights:
    outputs, inner = tensor.shape
    scales = tensor.new_empty(outputs, inner // GROUP)
    packed = torch.zeros(outputs, inner // 8, dtype=torch.int32, device=tensor.device)
    for rows in _parts(tensor):
        groups = tensor[rows].float().view(-1, inner // GROUP, GROUP)
        scales[rows] = (groups.abs().amax(2) / 7).clamp(min=2.0**-100).to(tensor.dtype)
        integers = (groups / scales[rows].float()[:, :, None]).round_().clamp_(-8, 7).add_(8).to(torch.int32)
        words = integers.view(len(groups), inner // 8, 8)
        for i in range(8):
            packed[rows] |= words[:, :, i] << 4 * i
    shape = torch.tensor([outputs, inner])
    return {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": shape}


def _parts(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(first, first + _AT_ONCE) for first in range(0, len(tensor), _AT_ONCE))
