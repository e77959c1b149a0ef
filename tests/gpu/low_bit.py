"""Random operands of matmuls with weights of 4 or 8 bits, on a CUDA device."""

from typing import Any

import torch


def low_bit(
    operator: str, width: int, inner: int, *, rows: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the inputs of an operator, and its attributes."""
    on_device: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(3)}
    padded = -(-inner // 128) * 128
    stored = padded if operator == "int8_matmul" else padded // 2
    x = torch.randn(rows, inner, **on_device).to(dtype)
    weight = torch.randint(0, 256, (width, stored), dtype=torch.uint8, **on_device)
    if operator == "float4_matmul":
        scales = torch.randint(0, 127, (width, padded // 16), dtype=torch.uint8, **on_device)
        factors = (torch.rand(width, **on_device) + 0.5) / 100
        return {"x": x, "weight": weight, "scales": scales, "factors": factors}, {"group_size": 16}
    scales = ((torch.rand(width, padded // 32, **on_device) + 0.5) / 100).to(dtype)
    return {"x": x, "weight": weight, "scales": scales}, {"group_size": 32}
