"""Inputs for ``latent_attention`` with ragged rows and runs, to compare its implementations."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandemrt.plugins.operators.constants import LATENT
from tests.engine import attention_cases

RANK, ROTATED = LATENT
CACHED = RANK + ROTATED
SCALE = CACHED**-0.5


def case(
    lengths: Sequence[int],
    query: int,
    runs: Sequence[tuple[int, int]] = (),
    padding: int = 0,
    *,
    heads: int,
    dtype: np.dtype[Any],
    **how: Any,
) -> dict[str, np.ndarray]:
    """Tensors by name, as ``attention_cases.case`` makes them for one KV head whose keys are the values."""
    tensors = attention_cases.case(
        lengths, query, runs, padding, heads=heads, kv_heads=1, head_dim=CACHED, dtype=dtype, **how
    )
    qkv = tensors["qkv"]
    place = ("block_table", "write_index", *attention_cases.PROMPTS)
    return {
        "query": np.ascontiguousarray(qkv[:, : heads * CACHED]),
        "key": np.ascontiguousarray(qkv[:, heads * CACHED : (heads + 1) * CACHED]),
        "cache": tensors["key_cache"],
        **{name: tensors[name] for name in place},
        **{name: np.ascontiguousarray(tensors[name][:, : ROTATED // 2]) for name in ("cosine", "sine")},
    }
