"""Measure a mixture of experts on a CUDA device, in microseconds by replay of a CUDA graph.

python -m tools.bench_experts                    # Qwen3-30B-A3B's shape, random routers, 1 to 2,048 rows

A line: how many experts some row chose, the microseconds that reading their weights takes at best, those of the whole
operator, and those that the other way of its products takes (plugins/kernels/experts_grouped.py). Weights of several
layers take turns, more than fit the second-level cache.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.experts import Mixture
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, fits_groups
from tandemrt.plugins.launch import Context
from tools.bench_attention import replay
from tools.gpu.models import BANDWIDTH

LAYERS = 3


def line(rows: int, experts: int, chosen: int, hidden: int, width: int, context: Context) -> tuple[str, ...]:
    """One number of rows."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    layers = [
        {
            "x": drawn(rows, hidden),
            "router_logits": drawn(rows, experts),
            "gate_up": drawn(2 * experts * width, hidden) / hidden**0.5,
            "down": drawn(experts * hidden, width) / width**0.5,
            "mixed": drawn(rows, hidden),
        }
        for _ in range(LAYERS)
    ]
    given = {"per_token": chosen, "normalized": 1}
    counts = [len(each["router_logits"].topk(chosen)[1].unique()) for each in layers]
    floor = 1e6 * sum(counts) / LAYERS * 3 * hidden * width * 2 / BANDWIDTH
    grouped = fits_groups(layers[0], chosen, context)
    times = []
    for kind in (GroupedMixture, Mixture) if grouped else (Mixture, GroupedMixture):
        calls = [kind(each, given, context) for each in layers]

        def run(calls: list[Mixture | GroupedMixture] = calls) -> None:
            for call in calls:
                call.run()

        times.append(replay(run, LAYERS))
    way = "grouped" if grouped else "streamed"
    return str(rows), f"{sum(counts) / LAYERS:.1f}", f"{floor:.0f}", way, *(f"{time:.1f}" for time in times)


def main(
    rows: Annotated[str, typer.Option(help="Rows of each line.")] = "1,2,4,5,8,16,40,80,160,320,512,1024,2048",
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 128,
    chosen: Annotated[int, typer.Option(help="Those that a row chooses.")] = 8,
    hidden: Annotated[int, typer.Option(help="Values of a row.")] = 2048,
    width: Annotated[int, typer.Option(help="Of an expert.")] = 768,
) -> None:
    """Print the table."""
    table = Table("rows", "experts", "floor", "way", "operator", "the other way", title="microseconds")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        major, minor = torch.cuda.get_device_capability()
        compile_kernels([f"{major}.{minor}"], Path(folder), names=["experts", "swiglu"], dtypes=["bfloat16"])
        context = Context(torch.device("cuda", torch.cuda.current_device()), Path(folder))
        for each in rows.split(","):
            table.add_row(*line(int(each), experts, chosen, hidden, width, context))
            torch.cuda.empty_cache()
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
