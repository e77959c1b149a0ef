"""Calls of ``gated_delta_net`` for tests of its implementations."""

from collections.abc import Sequence
from typing import Any

import numpy as np

KERNEL, WINDOW = 4, 5
HISTORY = WINDOW + KERNEL - 1


def weights(rng: np.random.Generator, sizes: "Sizes", kind: np.dtype[Any]) -> dict[str, np.ndarray]:
    return {
        "conv_weight": (rng.normal(size=(sizes.channels, KERNEL)) / 2).astype(kind),
        "decay_scale": -np.exp(rng.normal(size=sizes.value_heads)).astype(np.float32),
        "dt_bias": rng.normal(size=sizes.decays).astype(np.float32),
    }


class Sizes:
    """Sizes of a layer; ``per_channel``: one decay per key channel."""

    def __init__(
        self, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, per_channel: bool = False
    ) -> None:
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = key_heads, value_heads, key_dim, value_dim
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.decays = value_heads * (key_dim if per_channel else 1)
        self.width = self.channels + self.decays + value_heads
        self.heads = {"key_heads": key_heads, "value_heads": value_heads}

    def state(self, slots: int) -> tuple[int, ...]:
        return slots, self.value_heads, self.key_dim, self.value_dim


def call(
    sizes: Sizes,
    kind: np.dtype[Any],
    rows: Sequence[tuple[int, int, int]],
    query: int,
    runs: Sequence[tuple[int, int, int, int]] = (),
) -> dict[str, np.ndarray]:
    """Return the inputs of a packed call: windows of ``query`` tokens with the three indices of each of ``rows``, and
    ``runs`` (slot, tokens that the state covers, tokens before the run, tokens of the run).
    """
    rng = np.random.default_rng(len(rows) + query)
    slots = 1 + max([len(rows), *(slot for slot, *_ in runs)])
    counts = [count for *_, count in runs]
    indices = np.array(rows, np.int64).reshape(len(rows), 3)
    mixed = rng.normal(size=(len(rows) * query + sum(counts), sizes.width)).astype(kind)
    return {
        "mixed": mixed,
        "state": rng.normal(size=sizes.state(slots)).astype(np.float32),
        "recent": rng.normal(size=(slots, HISTORY, sizes.width)).astype(kind),
        **weights(rng, sizes, kind),
        "state_index": indices[:, 0].copy(),
        "write_index": indices[:, 1].copy(),
        "commit_index": indices[:, 2].copy(),
        "prompt_rows": np.repeat(np.arange(len(runs), dtype=np.int32), counts),
        "prompt_starts": np.cumsum([0, *counts]).astype(np.int32),
        "prompt_index": np.array([index for _, _, index, _ in runs], np.int64),
        "prompt_slots": np.array([slot for slot, *_ in runs], np.int64),
        "prompt_state_index": np.array([covered for _, covered, _, _ in runs], np.int64),
    }
