"""Case ``int4``: matmuls with weights of 4 and 8 bits at the shapes of an 8B Llama, next to bfloat16 (torch.mm).

python -m tools.bench.kernels int4                     # 1 to 2,048 rows, groups of 128 integers

``reading`` is the time to read the packed 4-bit integers and their scales once: the memory floor.
"""

from typing import Annotated

import torch
import typer

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS
from tandemrt.plugins.operators.launch import Call, Context
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.matmul_shapes import DEFAULT_ROWS, cases, positive
from tools.bench.kernels.replay import COLD, bandwidth, best_us, run_all
from tools.bench.options import Rows, integers
from tools.bench.report import Json, Report, Row

_FORMS = ("int4", "int8", "NVFP4", "MXFP4", "q4_k", "q6_k")


def main(
    rows: Rows = DEFAULT_ROWS,
    group: Annotated[int, typer.Option(help="Integers that share a scale: 32, 64 or 128.")] = 128,
    head: Annotated[bool, typer.Option(help="Measure the lm_head as well.")] = True,
    out: Json = None,
) -> None:
    """Time matmuls with weights of 4 and 8 bits."""
    lines: list[Row] = []
    with compiled_kernels("int4", "int8", "float4", "k_quants", dtypes=["bfloat16"]) as context:
        for name, outputs, inputs, count in cases(integers(rows), head=head):
            lines.append((name, count, *_times(outputs, inputs, count, group, context)))
            torch.cuda.empty_cache()
    columns = {"out": "", "rows": ""} | dict.fromkeys(("reading", *_FORMS, "bfloat16"), ".1f")
    Report(out).add("microseconds", columns, lines)


def _times(outputs: int, inputs: int, rows: int, group: int, context: Context) -> tuple[float, ...]:
    """Return microseconds to read the 4-bit weights, of the matmul in each form, and of the bfloat16 matmul."""
    nbytes = outputs * inputs // 2 + 2 * outputs * inputs // group
    x, out = positive(rows, inputs), positive(rows, outputs)

    def low_bit(form: str) -> float:
        size = nbytes * (2 if form in ("int8", "q6_k") else 1)
        calls = [_call(form, x, out, group, context) for _ in range(max(2, int(COLD / size) + 1))]
        return best_us(run_all(calls), len(calls))

    unquantized = [positive(outputs, inputs) for _ in range(max(2, int(COLD / (2 * outputs * inputs)) + 1))]

    def bfloat16() -> None:
        for weight in unquantized:
            torch.mm(x, weight.t(), out=out)

    return nbytes / bandwidth() * 1e6, *map(low_bit, _FORMS), best_us(bfloat16, len(unquantized))


def _call(form: str, x: torch.Tensor, out: torch.Tensor, group: int, context: Context) -> Call:
    """Bind the operator of ``form`` to random weights."""
    outputs, inputs = out.shape[1], x.shape[1]
    if (quant := K_QUANTS.get(form)) is not None:
        tensors = {"x": x, "weight": _bytes(outputs, inputs * quant.bits // 8), "out": out}
        tensors["scales"] = _bytes(outputs, quant.scales_of_output(inputs)).view(torch.int8) & 63
        tensors["factors"] = positive(outputs, quant.factors_of_output(inputs), dtype=torch.float16)
        return launcher(f"{form}_matmul", context)(tensors, {}, context)
    operator = f"{form}_matmul" if form.startswith("int") else "float4_matmul"
    group = {"NVFP4": 16, "MXFP4": 32}.get(form, group)
    tensors = {"x": x, "weight": _bytes(outputs, inputs if form == "int8" else inputs // 2), "out": out}
    if operator == "float4_matmul":
        tensors["scales"] = _bytes(outputs, inputs // group).clamp_(1, 120)
        tensors["factors"] = positive(outputs, dtype=torch.float32)
    else:
        tensors["scales"] = positive(outputs, inputs // group)
    return launcher(operator, context)(tensors, {"group_size": group}, context)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
