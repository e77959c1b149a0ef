"""Measure products with weights of 4 bits on a CUDA device, in microseconds by replay of a CUDA graph.

python -m tools.bench_int4                     # at the shapes of an 8B Llama, at 1 to 2,048 rows, groups of 128 inputs

Beside them are the same products in bfloat16 (torch.mm), and what reading the 4 bits and their scales takes at best.
Weights are more than fit the second-level cache.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tandemrt.plugins.faces import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tools.bench_attention import COLD, replay
from tools.bench_float8 import HEAD, SHAPES, WIDE, numbers
from tools.gpu.models import BANDWIDTH


def products(width: int, inner: int, rows: int, group: int, context: Context) -> tuple[str, ...]:
    """The time to read a weight of 4 bits, a product by it, and one by a weight in bfloat16."""
    nbytes = width * inner // 2 + 2 * width * inner // group
    x, product = numbers(rows, inner), numbers(rows, width)
    calls = []
    for _ in range(max(2, int(COLD / nbytes) + 1)):
        weight = torch.randint(0, 256, (width, inner // 2), dtype=torch.uint8, device="cuda")
        tensors = {"x": x, "weight": weight, "scales": numbers(width, inner // group), "product": product}
        calls.append(launcher("int4_product", context)(tensors, {"block": group}, context))
    whole = [numbers(width, inner) for _ in range(max(2, int(COLD / (2 * width * inner)) + 1))]

    def narrow() -> None:
        for call in calls:
            call.run()

    def wide() -> None:
        for weight in whole:
            torch.mm(x, weight.t(), out=product)

    times = (nbytes / BANDWIDTH * 1e6, replay(narrow, len(calls)), replay(wide, len(whole)))
    return tuple(f"{each:.1f}" for each in times)


def main(
    rows: Annotated[str, typer.Option(help="Rows of each line.")] = "1,5,16,64,80,320,2048",
    group: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 128,
    head: Annotated[bool, typer.Option(help="The head, too.")] = True,
) -> None:
    """Print the table."""
    table = Table("product", "rows", "reading", "4 bits", "bfloat16", title="microseconds")
    with tempfile.TemporaryDirectory() as folder:
        major, minor = torch.cuda.get_device_capability()
        compile_kernels([f"{major}.{minor}"], Path(folder), names=["int4"], dtypes=[str(WIDE).partition(".")[2]])
        context = Context(torch.device("cuda", torch.cuda.current_device()), Path(folder))
        for name, (width, inner) in (SHAPES | (HEAD if head else {})).items():
            for count in map(int, rows.split(",")):
                if name not in HEAD or count <= 320:
                    table.add_row(name, str(count), *products(width, inner, count, group, context))
                    torch.cuda.empty_cache()
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
