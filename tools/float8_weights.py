"""Weights in float8 by channel, on any device: what compressed-tensors stores, and says of it in config.json."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.agreement import Weights

_LARGEST = 448.0  # of float8_e4m3fn
_PRODUCTS = ("_proj.weight", "lm_head.weight")


def in_float8(weights: Weights) -> Weights:
    """The products of ``weights``, the head's too, in float8_e4m3fn with a scale per output; the rest as it is."""
    found: Weights = {}
    for name, tensor in weights.items():
        if not name.endswith(_PRODUCTS):
            found[name] = tensor
            continue
        scales = (tensor.abs().amax(1, keepdim=True).float() / _LARGEST).clamp(min=2.0**-100)
        found[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        for begin in range(0, len(tensor), 8192):  # a head in float32 is 2 GB
            rows = slice(begin, begin + 8192)
            found[name][rows] = (tensor[rows].float() / scales[rows]).to(torch.float8_e4m3fn)
        found[f"{name}_scale"] = scales
    return found


def say_float8(folder: Path, whole: Sequence[str] = ()) -> None:
    """Add to config.json that weights have a scale per channel and inputs one per token, but for modules ``whole``."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(whole),
    }
    path.write_text(json.dumps(config, indent=2))
