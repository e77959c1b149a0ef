"""Measure window_attention on a CUDA device: microseconds per layer by replay of a CUDA graph, beside other kernels.

python -m tools.bench_attention                     # 32 heads, 8 KV heads of 128, bfloat16, 1,000 tokens cached
python -m tools.bench_attention --splits 2 --batch 16 --new 5
python -m tools.bench_attention --runs --new 512 --new 2048 --context 8000
python -m tools.bench_attention --kv-dtype float8_e4m3fn --alone
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tandemrt.plugins.kernels.attention import launch
from tandemrt.plugins.kernels.attention_plan import KEYS
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tandemrt.runtime.caches.kv_cache import no_prompts
from tools.gpu.paged_attention import paged_attention

BANDWIDTH = 4.3e12  # bytes per second that one H200 was seen to read
COLD = 400e6  # bytes of cache that a graph walks through: far more than the 50 MB of its second-level cache


@dataclass(frozen=True)
class Shape:
    """One call: ``batch`` rows with ``context`` cached tokens each and ``new`` tokens more.

    ``runs``: these are runs of prompts, not windows.
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
        return self.cache_bytes / BANDWIDTH * 1e6

    @property
    def layers(self) -> int:
        return min(64, max(2, math.ceil(COLD / self.cache_bytes)))

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=self.dtype, device="cuda")


def replay(run: Callable[[], None], layers: int, stream: torch.cuda.Stream | None = None) -> float:
    """Microseconds per layer: the best of ten, each several replays of a graph in which ``run`` was captured."""
    stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            run()
        times: list[float] = []
        count = 5
        graph.replay()
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(count):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count / layers)
    return min(times)


def window_attention(shape: Shape, context: Context, splits: int | None) -> float:
    blocks = math.ceil((shape.context + shape.new) / KEYS)
    table = 1 + torch.randperm(shape.batch * blocks, device="cuda").to(torch.int32).view(shape.batch, blocks)
    index = torch.full((shape.batch,), shape.context, device="cuda")
    angles = shape.normal(blocks * KEYS, shape.head_dim // 2)
    shared = {
        "qkv": shape.normal(shape.batch * shape.new, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "mixed": shape.normal(shape.batch * shape.new, shape.heads * shape.head_dim),
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "block_table": table,
        "write_index": index,
        **no_prompts(table),
    }
    if shape.runs:
        ramp = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
        shared |= {"block_table": table[:1], "write_index": index[:1], "prompt_table": table, "prompt_index": index}
        shared |= {"prompt_rows": ramp[:-1].repeat_interleave(shape.new), "prompt_starts": shape.new * ramp}
    attributes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "scale": shape.head_dim**-0.5, "splits": splits}
    calls = []
    for _ in range(shape.layers):
        size = (1 + table.numel(), shape.kv_heads, KEYS, shape.head_dim)
        caches = {name: shape.normal(*size).to(shape.cached) for name in ("key_cache", "value_cache")}
        calls.append(launch(shared | caches, attributes, context))

    def run() -> None:
        for call in calls:
            call.run()

    return replay(run, shape.layers)


def scaled_dot_product(shape: Shape) -> float:
    """torch's, over a dense cache, not causal within the window: rotary embedding and cache update not included."""
    query = shape.normal(shape.batch, shape.heads, shape.new, shape.head_dim)
    size = (shape.batch, shape.kv_heads, shape.context + shape.new, shape.head_dim)
    caches = [(shape.normal(*size), shape.normal(*size)) for _ in range(shape.layers)]

    def run() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return replay(run, shape.layers)


def main(
    batch: Annotated[list[int] | None, typer.Option(help="rows; may be given several times")] = None,
    new: Annotated[list[int] | None, typer.Option(help="new tokens per row; may be given several times")] = None,
    context: int = 1000,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="what the cache holds: float8_e4m3fn; default: DTYPE")] = None,
    splits: Annotated[int | None, typer.Option(help="blocks that share a row's keys; chosen if not given")] = None,
    runs: Annotated[bool, typer.Option(help="new tokens are runs of prompts instead of windows")] = False,
    alone: Annotated[bool, typer.Option(help="only the kernel, nothing beside it")] = False,
) -> None:
    major, minor = torch.cuda.get_device_capability()
    title = (
        f"microseconds per layer, {heads} heads, {kv_heads} KV heads of {head_dim}, {dtype}, {context} tokens cached"
        f" in {kv_dtype or dtype}"
    )
    table = Table("batch", "new", "floor", "window_attention", "/ floor", "PagedAttention", "torch SDPA", title=title)
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels([f"{major}.{minor}"], Path(folder), names=["attention", "attention_float8"], dtypes=[dtype])
        shared = Context(torch.device("cuda", torch.cuda.current_device()), Path(folder))
        shapes = [(b, n, runs) for b in batch or (1, 8, 16, 32, 64) for n in new or (1, 2, 5, 8)]
        cached = getattr(torch, kv_dtype or dtype)
        for rows, tokens, are_runs in [*shapes, *([] if batch or new else [(1, 512, True)])]:
            shape = Shape(rows, tokens, context, heads, kv_heads, head_dim, getattr(torch, dtype), cached, are_runs)
            mine = window_attention(shape, shared, splits)
            others: list[Any] = [None, None] if alone else [paged_attention(shape, replay), scaled_dot_product(shape)]
            cells = ["-" if value is None else f"{value:.1f}" for value in (shape.floor, mine, *others)]
            table.add_row(str(rows), str(tokens), *cells[:2], f"{mine / shape.floor:.2f}", *cells[2:])
            torch.cuda.empty_cache()
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
