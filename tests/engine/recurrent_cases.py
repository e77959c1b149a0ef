"""Calls of ``linear_attention`` and ``short_convolution`` for tests of their implementations."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tandemrt.plugins.operators.constants import OutputNorm
from tandemrt.plugins.operators.projections import Projections

KERNEL, WINDOW = 4, 5
HISTORY = WINDOW + KERNEL - 1

Order = Literal["by kind", "by key head", "as Mamba-2"]


class Sizes:
    """Sizes of a layer. ``per_channel``: one decay per key channel. Mamba-2's order has no delta rule."""

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        per_channel: bool = False,
        order: Order = "by kind",
        update_scale: float = 1.0,
    ) -> None:
        self.value_heads, self.key_dim, self.value_dim = value_heads, key_dim, value_dim
        keys, values, shared = key_heads * key_dim, value_heads * value_dim, value_heads // key_heads
        decays = value_heads * (key_dim if per_channel else 1)
        gates = decays + value_heads
        names = "query_at", "key_at", "value_at", "decay_at", "update_at", "gate_at", "by_key_head"
        first, second = gates + key_dim, gates + 2 * key_dim  # by key head
        starts: dict[Order, tuple[int, ...]] = {
            "by kind": (gates, gates + keys, gates + 2 * keys, 0, decays, gates + 2 * keys + values, 0),
            "by key head": (gates, first, second, shared, 0, second + shared * value_dim, 1),
            "as Mamba-2": (2 * values + keys, 2 * values, values, 2 * values + 2 * keys, -1, 0, 0),
        }
        places = dict(zip(names, starts[order], strict=True))
        self.parts = Projections(key_heads, value_heads, key_dim, value_dim, decays, **places)
        mamba = order == "as Mamba-2"
        self.attributes: dict[str, Any] = {
            "key_heads": key_heads,
            "value_heads": value_heads,
            **places,
            "update_scale": update_scale,
            "sigmoid_gate": int(per_channel),
            "epsilon": 1e-5,
            "norm": int(OutputNorm.AFTER_GATE if mamba else OutputNorm.BEFORE_GATE),
            "norm_groups": key_heads if mamba else value_heads,
        }

    def state(self, slots: int) -> tuple[int, ...]:
        return slots, self.value_heads, self.key_dim, self.value_dim

    def weights(self, rng: np.random.Generator, kind: np.dtype[Any]) -> dict[str, np.ndarray]:
        heads, parts = self.value_heads, self.parts
        norm = heads * self.value_dim if self.attributes["norm"] == OutputNorm.AFTER_GATE else self.value_dim
        return {
            "conv_weight": (rng.normal(size=(parts.channels, KERNEL)) / 2).astype(kind),
            "conv_bias": rng.normal(size=parts.channels).astype(np.float32) / 4,
            "decay_scale": -np.exp(rng.normal(size=heads)).astype(np.float32),
            "dt_bias": rng.normal(size=parts.decays).astype(np.float32),
            "skip": rng.normal(size=heads).astype(np.float32),
            "norm_weight": 1 + rng.normal(size=norm).astype(np.float32) / 4,
        }


Runs = Sequence[tuple[int, int, int, int]]


def call(
    sizes: Sizes, kind: np.dtype[Any], rows: Sequence[tuple[int, int, int]], query: int, runs: Runs = ()
) -> dict[str, np.ndarray]:
    """Return the inputs of a packed call: windows of ``query`` tokens with the three indices of each of ``rows``, and
    ``runs`` (slot, tokens that the state covers, tokens before the run, tokens of the run).
    """
    rng = np.random.default_rng(len(rows) + query)
    slots, indices = _slots(rows, runs), np.array(rows, np.int64).reshape(len(rows), 3)
    return {
        "projected": rng.normal(size=(_tokens(rows, query, runs), sizes.parts.pitch)).astype(kind),
        "state": rng.normal(size=sizes.state(slots)).astype(np.float32),
        "recent": rng.normal(size=(slots, HISTORY, sizes.parts.width)).astype(kind),
        **sizes.weights(rng, kind),
        "state_index": indices[:, 0].copy(),
        "write_index": indices[:, 1].copy(),
        "commit_index": indices[:, 2].copy(),
        **_prompts(runs),
        "prompt_state_index": np.array([covered for _, covered, _, _ in runs], np.int64),
    }


def convolution_call(
    channels: int, kind: np.dtype[Any], rows: Sequence[tuple[int, int, int]], query: int, runs: Runs = ()
) -> dict[str, np.ndarray]:
    """Return the inputs of a call of ``short_convolution``; otherwise as ``call``."""
    rng, slots = np.random.default_rng(len(rows) + query), _slots(rows, runs)
    return {
        "projected": rng.normal(size=(_tokens(rows, query, runs), 3 * channels)).astype(kind),
        "recent": rng.normal(size=(slots, HISTORY, channels)).astype(kind),
        "conv_weight": (rng.normal(size=(channels, KERNEL)) / 2).astype(kind),
        "conv_bias": rng.normal(size=channels).astype(np.float32),
        "write_index": np.array([index for _, index, _ in rows], np.int64),
        **_prompts(runs),
    }


def _slots(rows: Sequence[tuple[int, int, int]], runs: Runs) -> int:
    return 1 + max([len(rows), *(slot for slot, *_ in runs)])


def _tokens(rows: Sequence[tuple[int, int, int]], query: int, runs: Runs) -> int:
    return len(rows) * query + sum(count for *_, count in runs)


def _prompts(runs: Runs) -> dict[str, np.ndarray]:
    counts = [count for *_, count in runs]
    return {
        "prompt_rows": np.repeat(np.arange(len(runs), dtype=np.int32), counts),
        "prompt_starts": np.cumsum([0, *counts]).astype(np.int32),
        "prompt_index": np.array([index for _, _, index, _ in runs], np.int64),
        "prompt_slots": np.array([slot for slot, *_ in runs], np.int64),
    }
