"""Measure the export of a checkpoint: seconds, peak memory and graph file size, each lowering in its own process.

python -m tools.bench_export                    # a sparse Llama checkpoint with the dimensions of an 8B model
python -m tools.bench_export --family qwen3 --capacity 8192
"""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from tandemrt.export.model.builder import save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.lowerings import Lowering
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.products import fuse_transposed_products
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tools.memory import peak_mb
from tools.random_checkpoint import Family, Size, write_checkpoint

LIMITS = {"seconds": 10.0, "peak_mb": 1000.0, "graph_mb": 2.0}


def measure(folder: Path, attention: Lowering, capacity: int) -> dict[str, float]:
    """Export once, in this process, a paged graph cut into its pieces.

    Peak memory is the whole process's, Python and its imports included; the graph file is the largest one.
    """
    begin = time.perf_counter()
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype="bfloat16", capacity=capacity, attention=attention)
    if attention == "paged":
        fuse_transposed_products(model)
    files = cut(model)[0] if attention == "paged" else {f"{attention}.onnx": model}
    for file, graph in files.items():
        save_model(graph, folder / file)
    return {
        "seconds": time.perf_counter() - begin,
        "peak_mb": peak_mb(),
        "graph_mb": max((folder / file).stat().st_size for file in files) / 1e6,
    }


def main(
    family: Annotated[Family, typer.Option(help="Architecture.")] = Family.LLAMA,
    size: Annotated[Size, typer.Option(help="Dimensions.")] = Size.B8,
    capacity: Annotated[int, typer.Option(help="Tokens a cache row holds.", min=1)] = 4096,
) -> None:
    """Measure the export of a sparse random checkpoint and compare with the limits."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        nbytes = write_checkpoint(folder, family, size, sparse=True)
        lowerings: tuple[Lowering, ...] = get_args(Lowering)
        results = {attention: _in_child(folder, attention, capacity) for attention in lowerings}
    table = Table(title=f"export of {family.value} {size.value}, {nbytes / 1e9:.1f} GB of weights, capacity {capacity}")
    for heading in ("lowering", "seconds", "peak memory, MB", "graph file, MB"):
        table.add_column(heading, justify="right")
    for attention, result in results.items():
        table.add_row(attention, *(_cell(result[name], limit) for name, limit in LIMITS.items()))
    table.add_row("limit", *(f"{limit:g}" for limit in LIMITS.values()))
    Console().print(table)
    if any(result[name] > limit for result in results.values() for name, limit in LIMITS.items()):
        raise typer.Exit(1)


def _in_child(folder: Path, attention: Lowering, capacity: int) -> Any:
    # A fresh interpreter, so that nothing this process did counts.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, attention, capacity))


def _cell(value: float, limit: float) -> str:
    return f"[{'green' if value <= limit else 'red'}]{value:.2f}[/]"


if __name__ == "__main__":
    typer.run(main)
