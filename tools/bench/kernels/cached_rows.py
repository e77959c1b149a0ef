"""Tensors of operators over a paged cache that say which tokens of a call are new and where its rows are cached."""

import math
from typing import Any

import torch

from tandemrt.runtime.caches.kv_cache import no_prompts


def cached_rows(rows: int, new: int, context: int, block: int, *, runs: bool) -> dict[str, Any]:
    """Return the tensors for ``rows`` rows with ``context`` cached and ``new`` further tokens each.

    The blocks of ``block`` tokens are in random places. ``runs``: the new tokens are prompt chunks instead of draft
    windows.
    """
    blocks = math.ceil((context + new) / block)
    table = 1 + torch.randperm(rows * blocks, device="cuda").to(torch.int32).view(rows, blocks)
    index = torch.full((rows,), context, device="cuda")
    if not runs:
        return {"block_table": table, "write_index": index, **no_prompts(table)}
    ramp = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    return {
        "block_table": table[:1],
        "write_index": index[:1],
        "prompt_table": table,
        "prompt_index": index,
        "prompt_rows": ramp[:-1].repeat_interleave(new),
        "prompt_starts": new * ramp,
    }
