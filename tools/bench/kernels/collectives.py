"""``all_reduce`` of the GPUs of one host, on which a process each calls it many times in a row."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from tandemrt.plugins.kernels.collectives import DeviceRanks, launch_all_reduce
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.runtime.workers.ranks import Link, RankProcesses
from tools.bench.kernels.replay import best_us
from tools.bench.options import integers
from tools.bench.report import Json, Report, Row

_IN_A_ROW = 64
_EXCHANGED = 1 << 10  # bytes that hosts exchange at most


def main(
    ranks: Annotated[int, typer.Option(help="GPUs: 2, 4 or 8.")] = 2,
    rows: Annotated[str, typer.Option(help="Tokens of each line.")] = "1,5,16,64,320,1000,2048",
    columns: Annotated[str, typer.Option(help="Values per token, a table each.")] = "4096,8192",
    out: Json = None,
) -> None:
    """Time all_reduce in bfloat16, by graph replay of 64 in a row."""
    shapes = [(row, column) for column in integers(columns) for row in integers(rows)]
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels([capability], Path(folder), names=["collectives"], dtypes=["bfloat16"])
        processes = RankProcesses(ranks, _serve, (folder, shapes), shared_bytes(ranks, _EXCHANGED), 8)
        try:
            shared = SharedRanks(0, processes.parts, processes.arrived, processes.require)
            context = _context(shared, Path(folder), shapes)
            processes.wait_until_opened()
            processes.command(lambda memory: memory.fill(1))
            times = _measured(context, shapes)
        finally:
            processes.close()
    lines: list[Row] = [
        (row, column, microseconds, 2 * row * column / microseconds / 1e3)
        for (row, column), microseconds in zip(shapes, times, strict=True)
    ]
    Report(out).add(f"all_reduce of {ranks} GPUs", {"rows": "", "columns": "", "us": ".1f", "GB/s": ".0f"}, lines)


def _context(shared: SharedRanks, kernels: Path, shapes: Sequence[tuple[int, int]]) -> Context:
    device = torch.device("cuda", shared.rank)
    torch.cuda.set_device(device)
    most = 2 * max(row * column for row, column in shapes)
    return Context(device, kernels, ranks=DeviceRanks(shared, device, most, 0))


def _measured(context: Context, shapes: Sequence[tuple[int, int]]) -> list[float]:
    """Return microseconds per call of each shape. All ranks call this at the same time."""
    times = []
    for row, column in shapes:
        x = torch.randn(row, column, dtype=torch.bfloat16, device=context.device)
        call = launch_all_reduce({"x": x, "sum": torch.empty_like(x)}, {}, context)
        times.append(best_us(lambda call=call: [call.run() for _ in range(_IN_A_ROW)], _IN_A_ROW))  # type: ignore[misc]
    return times


def _serve(link: Link, kernels: str, shapes: Sequence[tuple[int, int]]) -> None:
    context = _context(SharedRanks(link.rank, link.parts, link.arrived), Path(kernels), shapes)
    link.opened()

    def run(_: np.ndarray) -> None:
        _measured(context, shapes)

    link.run_commands(run)
