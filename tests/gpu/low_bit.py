"""Random operands of matmuls with weights of 4 or 8 bits, on a CUDA device."""

from typing import Any

import torch

from tandemrt.plugins.operators.constants import SILU_EXPERTS
from tandemrt.plugins.operators.k_quants_layout import BLOCK, K_QUANTS


def low_bit(
    operator: str, width: int, inner: int, *, rows: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the inputs of an operator, and its attributes. ``inner`` is rounded up to what a type K needs."""
    on_device: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(3)}
    if (quant := K_QUANTS.get(operator.removesuffix("_matmul"))) is not None:
        inner = -(-inner // BLOCK) * BLOCK
        weight = torch.randint(0, 256, (width, inner * quant.bits // 8), dtype=torch.uint8, **on_device)
        sizes = (0 if quant.minima else -64, 64, (width, quant.scales_of_output(inner)))
        scales = torch.randint(*sizes, dtype=torch.int8, **on_device)
        factors = ((torch.rand(width, quant.factors_of_output(inner), **on_device) + 0.5) / 3000).half()
        x = torch.randn(rows, inner, **on_device).to(dtype)
        return {"x": x, "weight": weight, "scales": scales, "factors": factors}, {}
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


def low_bit_experts(
    operator: str,
    count: int,
    hidden: int,
    width: int,
    *,
    rows: int,
    chosen: int,
    dtype: torch.dtype = torch.bfloat16,
    groups: tuple[int, int] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the inputs of an operator of ``count`` experts, and its attributes; results are about 1.

    ``groups``: inputs per scale of both weights; None: the smallest.
    """
    on_device: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(5)}
    least = {"float4_experts": 16, "float8_experts": 128}.get(operator, 32)
    sizes = groups or (least, least)
    tensors = {
        "x": torch.randn(rows, hidden, **on_device).to(dtype),
        "router_logits": torch.randn(rows, count, **on_device).to(dtype),
    }
    for name, outputs, inner, group in (
        ("gate_up", count * 2 * width, hidden, sizes[0]),
        ("down", count * hidden, width, sizes[1]),
    ):
        padded, size = -(-inner // 128) * 128, inner**-0.5
        nbytes = padded if operator in ("int8_experts", "float8_experts") else padded // 2
        tensors[name] = torch.randint(0, 256, (outputs, nbytes), dtype=torch.uint8, **on_device)
        stored = -(-padded // group // 4) * 4
        if operator == "float8_experts":
            tensors[name][tensors[name] & 0x7F == 0x7F] = 0  # not a number
            tensors[f"{name}_scales"] = (torch.rand(outputs, padded // 128, **on_device) + 0.5) * size / 100
        elif operator == "float4_experts":
            tensors[f"{name}_scales"] = torch.randint(32, 80, (outputs, stored), dtype=torch.uint8, **on_device)
            tensors[f"{name}_factors"] = (torch.rand(outputs, **on_device) + 0.5) * size / 6
        else:
            most = 5 if operator == "int4_experts" else 75
            tensors[f"{name}_scales"] = ((torch.rand(outputs, stored, **on_device) + 0.5) * size / most).to(dtype)
    of_groups = {"gate_up_group": sizes[0], "down_group": sizes[1]}
    return tensors, {"per_token": chosen, "normalized": 1, **SILU_EXPERTS, **of_groups}
