"""Measure the export of a checkpoint: seconds, peak memory and graph file size, each lowering in its own process.

python -m tools.bench.export                    # a sparse Llama checkpoint with the dimensions of an 8B model
python -m tools.bench.export --family qwen3 --capacity 8192
"""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.pipelines import PIPELINES
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tools.bench.memory import peak_mb
from tools.bench.report import Json, Report, Row
from tools.models.random_checkpoint import Family, Size, write_checkpoint

LIMITS = {"seconds": 10.0, "peak memory, MB": 1000.0, "graph file, MB": 2.0}


def measure(folder: Path, lowering: Lowering, capacity: int) -> tuple[float, float, float]:
    """Export a graph, cut into subgraphs if it is paged, in this process; return the figures that LIMITS names.

    The peak memory is that of the whole process, Python and imports included. The graph file is the largest one,
    without the rotary tables that the basic lowering stores in it.
    """
    begin = time.perf_counter()
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype="bfloat16", capacity=capacity, lowering=lowering)
    PIPELINES[lowering](model)
    files = cut(model)[0] if lowering == "paged" else {f"{lowering}.onnx": model}
    for file, graph in files.items():
        save_model(graph, folder / file)
    tables = capacity * spec.head_dim * BYTES["bfloat16"] if lowering == "basic" else 0
    graph_mb = (max((folder / file).stat().st_size for file in files) - tables) / 1e6
    return time.perf_counter() - begin, peak_mb(), graph_mb


def main(
    family: Annotated[Family, typer.Option(help="Architecture.")] = Family.LLAMA,
    size: Annotated[Size, typer.Option(help="Dimensions.")] = Size.B8,
    capacity: Annotated[int, typer.Option(help="Tokens per row of the KV cache.", min=1)] = 4096,
    out: Json = None,
) -> None:
    """Measure the export of a sparse random checkpoint, and compare it with the limits."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        nbytes = write_checkpoint(folder, family, size, sparse=True)
        lowerings: tuple[Lowering, ...] = get_args(Lowering)
        results = {lowering: _in_child(folder, lowering, capacity) for lowering in lowerings}
    title = f"export of {family.value} {size.value}, {nbytes / 1e9:.1f} GB of weights, capacity {capacity}"
    rows: list[Row] = [(lowering, *result) for lowering, result in results.items()]
    Report(out).add(title, {"lowering": ""} | dict.fromkeys(LIMITS, ".2f"), [*rows, ("limit", *LIMITS.values())])
    if any(
        figure > limit for result in results.values() for figure, limit in zip(result, LIMITS.values(), strict=True)
    ):
        raise typer.Exit(1)


def _in_child(folder: Path, lowering: Lowering, capacity: int) -> Any:
    # Memory of this process does not count. The server of the children imports once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tandemrt.export.model.decoder", "tandemrt.export.passes.pipelines"])
    with context.Pool(1) as pool:
        return pool.apply(measure, (folder, lowering, capacity))


if __name__ == "__main__":
    typer.run(main)
