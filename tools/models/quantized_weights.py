"""Quantize matmul weights in the formats of published checkpoints, on any device, with its fields of config.json."""

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tandemrt.export.quantize.compressed_tensors import quantization_config
from tools.models.agreement import Weights

GROUP = 128  # inputs per scale in 4 bits, as in published checkpoints
_LARGEST = 448.0  # largest float8_e4m3fn
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # the numbers of e2m1
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_MATMULS = ("_proj.weight", "lm_head.weight")
_AT_ONCE = 8192  # rows at a time: an lm_head in float32 is 2 GB


class WeightFormat(StrEnum):
    """Format of matmul weights.

    ``unquantized``: the compute dtype. ``fp8``: float8 with a scale per output channel. ``int4``: a scale per GROUP
    inputs. ``mxfp4``: the experts of gpt-oss, and no other weights, in 4-bit floats with a scale per 32 inputs.
    """

    UNQUANTIZED = "unquantized"
    FP8 = "fp8"
    INT4 = "int4"
    MXFP4 = "mxfp4"


def quantize_matmuls(weights: Weights, weight_format: WeightFormat) -> Weights:
    """Return ``weights`` with all matmuls, the lm_head too, in ``weight_format``; other tensors are unchanged."""
    if weight_format is WeightFormat.UNQUANTIZED:
        return weights
    quantize, names = {
        WeightFormat.FP8: (_in_float8, _MATMULS),
        WeightFormat.INT4: (_in_int4, _MATMULS),
        WeightFormat.MXFP4: (_in_mxfp4, _EXPERTS),
    }[weight_format]
    quantized: Weights = {}
    for name, tensor in weights.items():
        quantized |= quantize(name, tensor) if name.endswith(names) else {name: tensor}
    return quantized


def write_quantization_config(folder: Path, weight_format: WeightFormat, unquantized: Sequence[str] = ()) -> None:
    """Add the quantization config to config.json.

    ``unquantized``: names of modules that are not quantized. In float8 inputs have a scale per token.
    """
    if weight_format is WeightFormat.UNQUANTIZED:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = _fields(weight_format, unquantized)
    path.write_text(json.dumps(config, indent=2))


def _fields(weight_format: WeightFormat, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a quantization config."""
    if weight_format is WeightFormat.MXFP4:
        others = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*others, *unquantized]}
    return quantization_config("fp8" if weight_format is WeightFormat.FP8 else "int4", GROUP, unquantized)


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


def _in_mxfp4(name: str, tensor: torch.Tensor) -> Weights:
    """Quantize [experts, inner, outputs]: blocks of 16 bytes, the lower half of a byte first, and exponents."""
    count, inner, outputs = tensor.shape
    blocks = torch.empty(count, outputs, inner // 32, 16, dtype=torch.uint8, device=tensor.device)
    scales = torch.empty(count, outputs, inner // 32, dtype=torch.uint8, device=tensor.device)
    between = torch.tensor(_BETWEEN, device=tensor.device)
    for expert in range(count):
        groups = tensor[expert].T.float().contiguous().view(outputs, inner // 32, 32)
        exponents = groups.abs().amax(2).clamp(min=2.0**-100).log2().floor() - 2  # the largest number is 1.5 * 2^2
        numbers = torch.bucketize(groups.abs() / exponents.exp2()[..., None], between) + 8 * (groups < 0)
        pairs = numbers.to(torch.uint8).view(outputs, -1, 16, 2)
        blocks[expert] = pairs[..., 0] | pairs[..., 1] << 4
        scales[expert] = (exponents + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _parts(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(first, first + _AT_ONCE) for first in range(0, len(tensor), _AT_ONCE))
