"""Case ``int4``: 4-bit matmuls at the shapes of an 8B Llama, next to bfloat16 (torch.mm) and the memory floor.

python -m tools.bench_kernels int4                     # 1 to 2,048 rows, groups of 128 inputs

The floor is the time to read the packed weights and their scales once.
"""

from typing import Annotated

import torch
import typer

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.launch import Context
from tools.bench_kernels.compiled import compiled_kernels
from tools.bench_kernels.matmul_shapes import DEFAULT_ROWS, cases, positive
from tools.bench_kernels.replay import COLD, bandwidth, best_us
from tools.bench_kernels.rows import Rows, counts
from tools.report import Json, Report, Row


def main(
    rows: Rows = DEFAULT_ROWS,
    group: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 128,
    head: Annotated[bool, typer.Option(help="Measure the lm_head as well.")] = True,
    out: Json = None,
) -> None:
    """Time 4-bit matmuls."""
    lines: list[Row] = []
    with compiled_kernels("int4", dtypes=["bfloat16"]) as context:
        for name, outputs, inputs, count in cases(counts(rows), head=head):
            lines.append((name, count, *_times(outputs, inputs, count, group, context)))
            torch.cuda.empty_cache()
    columns = {"out": "", "rows": ""} | dict.fromkeys(("reading", "4 bits", "bfloat16"), ".1f")
    Report(out).add("microseconds", columns, lines)


def _times(outputs: int, inputs: int, rows: int, group: int, context: Context) -> tuple[float, float, float]:
    """Return microseconds to read the 4-bit weights, of the 4-bit matmul, and of the bfloat16 matmul."""
    nbytes = outputs * inputs // 2 + 2 * outputs * inputs // group
    x, out = positive(rows, inputs), positive(rows, outputs)
    calls = []
    for _ in range(max(2, int(COLD / nbytes) + 1)):
        weight = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        tensors = {"x": x, "weight": weight, "scales": positive(outputs, inputs // group), "out": out}
        calls.append(launcher("int4_matmul", context)(tensors, {"group_size": group}, context))
    unquantized = [positive(outputs, inputs) for _ in range(max(2, int(COLD / (2 * outputs * inputs)) + 1))]

    def low_bit() -> None:
        for call in calls:
            call.run()

    def bfloat16() -> None:
        for weight in unquantized:
            torch.mm(x, weight.t(), out=out)

    return nbytes / bandwidth() * 1e6, best_us(low_bit, len(calls)), best_us(bfloat16, len(unquantized))
