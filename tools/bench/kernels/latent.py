"""Case ``latent``: the ``latent_attention`` operator over a paged cache of latent vectors.

python -m tools.bench.kernels latent                         # 16 heads, bfloat16, 1,000 tokens cached
python -m tools.bench.kernels latent --heads 128 --batch 16 --new 5 --context 8000
python -m tools.bench.kernels latent --runs --new 512

Times are microseconds per layer. The floor is the time to read the cached vectors once.
"""

import math
from typing import Annotated, Any

import torch
import typer

from tandemrt.plugins.kernels.latent_attention import launch
from tandemrt.plugins.operators.constants import LATENT
from tandemrt.plugins.operators.launch import Call
from tools.bench.kernels.cached_rows import cached_rows
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import COLD, bandwidth, best_us, run_all
from tools.bench.options import Batch, Cached, New, Runs, Splits
from tools.bench.report import Json, Report, Row

RANK, ROTATED = LATENT
BLOCK = 64
COLUMNS = {"batch": "", "new": "", "floor": ".1f", "latent_attention": ".1f", "/ floor": ".2f"}


def main(
    batch: Batch = None,
    new: New = None,
    context: Cached = 1000,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 16,
    dtype: Annotated[str, typer.Option(help="dtype of queries and cache.")] = "bfloat16",
    splits: Splits = None,
    runs: Runs = False,
    out: Json = None,
) -> None:
    """Time latent attention over a paged cache."""
    lines: list[Row] = []
    with compiled_kernels("latent_attention", dtypes=[dtype]) as launch_context:
        for rows in batch or (1, 8, 16, 64):
            for tokens in new or (1, 5):
                size = rows * (context + tokens) * (RANK + ROTATED) * getattr(torch, dtype).itemsize
                calls: list[Call] = [
                    launch(tensors, {"heads": heads, "scale": 0.1, "splits": splits}, launch_context)
                    for tensors in _layers(rows, tokens, context, heads, getattr(torch, dtype), size, runs=runs)
                ]
                taken, floor = best_us(run_all(calls), len(calls)), size / bandwidth()
                lines.append((rows, tokens, floor * 1e6, taken, taken / (floor * 1e6)))
                torch.cuda.empty_cache()
    title = f"microseconds per layer, {heads} heads, {dtype}, {context} tokens cached"
    Report(out).add(title, COLUMNS, lines)


def _layers(
    rows: int, new: int, context: int, heads: int, dtype: torch.dtype, size: int, *, runs: bool
) -> list[dict[str, Any]]:
    """Return the tensors of calls whose caches together exceed the second-level cache of the GPU."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    blocks = math.ceil((context + new) / BLOCK)
    shared = {
        "query": normal(rows * new, heads * (RANK + ROTATED)),
        "key": normal(rows * new, RANK + ROTATED),
        "mixed": normal(rows * new, heads * RANK),
        "cosine": normal(blocks * BLOCK, ROTATED // 2),
        "sine": normal(blocks * BLOCK, ROTATED // 2),
        **cached_rows(rows, new, context, BLOCK, runs=runs),
    }
    layers = min(64, max(2, math.ceil(COLD / size)))
    return [shared | {"cache": normal(1 + rows * blocks, 1, BLOCK, RANK + ROTATED)} for _ in range(layers)]
