"""Checks of the tensors that a launcher binds."""

from collections.abc import Mapping

import torch


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` is contiguous and has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: a contiguous {dtype}{list(shape)} is needed, got {tensor.dtype}{list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )


def check_packed(name: str, tokens: int, place: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless ``place`` locates ``tokens`` tokens of a packed call over a paged cache.

    ``place``: tensors by their names in a contract. ``name``: the tensor that has the tokens.
    """
    batch, prompts, of_runs = (len(place[each]) for each in ("write_index", "prompt_index", "prompt_rows"))
    blocks = place["block_table"].shape[1]
    needed = {
        "block_table": (torch.int32, (batch, blocks)),
        "write_index": (torch.int64, (batch,)),
        "prompt_rows": (torch.int32, (of_runs,)),
        "prompt_starts": (torch.int32, (prompts + 1,)),
        "prompt_index": (torch.int64, (prompts,)),
        "prompt_table": (torch.int32, (prompts, blocks)),
    }
    for each, (dtype, shape) in needed.items():
        check(each, place[each], dtype, shape)
    windows = tokens - of_runs
    if windows < 0 or (windows and windows % batch) or (of_runs and not prompts):
        raise ValueError(
            f"{name}: windows of equal length and runs of prompts are needed, "
            f"got {tokens} tokens, {batch} rows, {of_runs} prompt tokens and {prompts} runs"
        )
