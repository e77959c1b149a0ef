"""Case ``attention``: the ``window_attention`` operator over a paged KV cache.

python -m tools.bench.kernels attention                     # 32 heads, 8 KV heads of 128, bfloat16, 1,000 tokens cached
python -m tools.bench.kernels attention --splits 2 --batch 16 --new 5
python -m tools.bench.kernels attention --runs --new 512 --new 2048 --context 8000
python -m tools.bench.kernels attention --kv-dtype float8_e4m3fn
python -m tools.bench.kernels attention --batch-invariant --heads 16 --kv-heads 4 --head-dim 256

Times are microseconds per layer. The floor is the time to read keys and values once.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer

from tandemrt.plugins.kernels.attention import launch
from tandemrt.plugins.kernels.attention_plan import KEYS
from tandemrt.plugins.operators.launch import Call, Context
from tools.bench.kernels.cached_rows import cached_rows
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import COLD, bandwidth, best_us, run_all
from tools.bench.options import Batch, Cached, New, Runs, Splits
from tools.bench.report import Json, Report, Row

TIMES = dict.fromkeys(("floor", "window_attention", "/ floor"), ".1f")
COLUMNS = {"batch": "", "new": ""} | TIMES | {"/ floor": ".2f"}


@dataclass(frozen=True)
class Shape:
    """One call: ``batch`` rows with ``context`` cached and ``new`` further tokens each.

    ``runs``: the new tokens are prompt chunks instead of draft windows.
    """

    batch: int
    new: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cached: torch.dtype
    runs: bool

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * (self.context + self.new) * self.kv_heads * self.head_dim * self.cached.itemsize

    @property
    def floor(self) -> float:
        """Microseconds to read keys and values once."""
        return self.cache_bytes / bandwidth() * 1e6

    @property
    def layers(self) -> int:
        return min(64, max(2, math.ceil(COLD / self.cache_bytes)))

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=self.dtype, device="cuda")


def main(
    batch: Batch = None,
    new: New = None,
    context: Cached = 1000,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="dtype of queries.")] = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="dtype of the cache: float8_e4m3fn. Default: DTYPE.")] = None,
    splits: Splits = None,
    runs: Runs = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Time the form whose bits do not depend on the batch.")
    ] = False,
    out: Json = None,
) -> None:
    """Time attention over a paged KV cache."""
    shapes = [(b, n, runs) for b in batch or (1, 8, 16, 32, 64) for n in new or (1, 2, 5, 8)]
    shapes += [] if batch or new else [(1, 512, True)]
    cached = getattr(torch, kv_dtype or dtype)
    lines: list[Row] = []
    with compiled_kernels("attention", "attention_float8", dtypes=[dtype], head_dims=[head_dim]) as launch_context:
        if batch_invariant:
            sizes = {"window+1": max(tokens for _, tokens, _ in shapes), "query": 2048}
            launch_context = replace(launch_context, sizes=sizes, batch_invariant=True)
        for rows, tokens, are_runs in shapes:
            shape = Shape(rows, tokens, context, heads, kv_heads, head_dim, getattr(torch, dtype), cached, are_runs)
            ours = window_attention(shape, launch_context, splits)
            lines.append((rows, tokens, shape.floor, ours, ours / shape.floor))
            torch.cuda.empty_cache()
    title = (
        f"microseconds per layer, {heads} heads, {kv_heads} KV heads of {head_dim}, {dtype}, {context} tokens cached"
        f" in {kv_dtype or dtype}"
    )
    Report(out).add(title, COLUMNS, lines)


def window_attention(shape: Shape, context: Context, splits: int | None) -> float:
    """Return microseconds per layer of the operator, rotary embedding and cache update included."""
    return best_us(run_all(window_calls(shape, context, shape.layers, splits)), shape.layers)


def window_calls(shape: Shape, context: Context, layers: int, splits: int | None = None) -> list[Call]:
    """Bind the operator for ``layers`` layers, each with a cache of its own."""
    blocks = math.ceil((shape.context + shape.new) / KEYS)
    angles = shape.normal(blocks * KEYS, shape.head_dim // 2)
    shared: dict[str, Any] = {
        "qkv": shape.normal(shape.batch * shape.new, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "mixed": shape.normal(shape.batch * shape.new, shape.heads * shape.head_dim),
        "cosine": angles.cos(),
        "sine": angles.sin(),
        **cached_rows(shape.batch, shape.new, shape.context, KEYS, runs=shape.runs),
    }
    attributes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "scale": shape.head_dim**-0.5, "splits": splits}
    calls: list[Call] = []
    for _ in range(layers):
        size = (1 + shape.batch * blocks, shape.kv_heads, KEYS, shape.head_dim)
        caches = {name: shape.normal(*size).to(shape.cached) for name in ("key_cache", "value_cache")}
        calls.append(launch(shared | caches, attributes, context))
    return calls
