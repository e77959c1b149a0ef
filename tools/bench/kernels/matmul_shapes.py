"""The matmuls of an 8B Llama, and random operands for them."""

import torch

HIDDEN, MID = 4096, 14_336
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate, up": (2 * MID, HIDDEN), "down": (HIDDEN, MID)}
LM_HEAD = {"head": (128_256, HIDDEN)}
LM_HEAD_ROWS = 320  # a prompt's rows do not reach the lm_head
DEFAULT_ROWS = "1,5,16,64,80,320,2048"


def cases(rows: list[int], *, head: bool) -> list[tuple[str, int, int, int]]:
    """Return (name, outputs, inputs, rows) of every measured matmul; ``head`` includes the lm_head."""
    shapes = SHAPES | (LM_HEAD if head else {})
    return [
        (name, outputs, inputs, count)
        for name, (outputs, inputs) in shapes.items()
        for count in rows
        if name not in LM_HEAD or count <= LM_HEAD_ROWS
    ]


def positive(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random values in [0.1, 1.1) on the GPU, so that no product of two is zero."""
    return torch.rand(shape, device="cuda").add_(0.1).to(dtype)
