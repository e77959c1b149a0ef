"""Case ``float8``: FP8 matmuls at the shapes of an 8B Llama, and the operators between them.

python -m tools.bench.kernels float8                     # 1 to 2,048 rows

The first table times each matmul in bfloat16 (torch.mm), in FP8 (torch._scaled_mm with one scale per operand), and by
the cuBLASLt algorithm that the ``float8_matmul`` operator chooses, where it chooses one. The second times the operators
between matmuls, and a layer without its attention.
"""

from typing import Annotated

import torch
import typer

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.kernels.fastest_matmul import MOST_ROWS, FastestMatmul
from tandemrt.plugins.kernels.float8_matmul import FEW
from tandemrt.plugins.operators.launch import Call, Context
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.matmul_shapes import DEFAULT_ROWS, HIDDEN, MID, SHAPES, cases, positive
from tools.bench.kernels.replay import COLD, best_us, run_all
from tools.bench.options import Rows, integers
from tools.bench.report import Json, Report, Row

FLOAT8, BFLOAT16, FLOAT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
LAYERS = 8  # copies of a layer that one graph runs
FORMS = ("bfloat16", "float8", "chosen")


def main(
    rows: Rows = DEFAULT_ROWS,
    head: Annotated[bool, typer.Option(help="Measure the lm_head as well.")] = True,
    out: Json = None,
) -> None:
    """Time FP8 matmuls and the operators between them."""
    report = Report(out)
    with compiled_kernels("float8", dtypes=["bfloat16"]) as context:
        lines: list[Row] = []
        for name, outputs, inputs, count in cases(integers(rows), head=head):
            lines.append((name, count, *_matmul_times(outputs, inputs, count, context)))
            torch.cuda.empty_cache()
        report.add("microseconds", {"out": "", "rows": ""} | dict.fromkeys(FORMS, ".1f"), lines)
        columns = {"rows": ""} | dict.fromkeys(("norm", "swiglu", "rounding", "layer without attention"), ".1f")
        report.add("microseconds", columns, [(count, *_layer_times(count, context)) for count in integers(rows)])


def _matmul_times(outputs: int, inputs: int, rows: int, context: Context) -> tuple[float | None, ...]:
    """Return microseconds of the matmul in each of FORMS; None where the operator chooses no algorithm."""
    copies = max(2, int(COLD / (outputs * inputs)) + 1)
    weights = [positive(outputs, inputs, dtype=FLOAT8) for _ in range(copies)]
    unquantized = [weight.to(BFLOAT16) for weight in weights[: copies // 2 + 1]]
    x, out = positive(rows, inputs, dtype=FLOAT8), positive(rows, outputs)
    x_bfloat16, one = x.to(BFLOAT16), positive(1, dtype=FLOAT32)

    def bfloat16() -> None:
        for weight in unquantized:
            torch.mm(x_bfloat16, weight.t(), out=out)

    def float8() -> None:
        for weight in weights:
            torch._scaled_mm(x, weight.t(), one, one, out_dtype=BFLOAT16, out=out)

    times = best_us(bfloat16, len(unquantized)), best_us(float8, copies)
    if FEW < rows <= MOST_ROWS:
        chosen = [FastestMatmul(context, x, weight, out) for weight in weights]
        return (*times, best_us(run_all(chosen), copies))
    return (*times, None)


def _layer_times(rows: int, context: Context) -> tuple[float, ...]:
    """Return microseconds of the norm, of SwiGLU, of quantization, and of a layer of them and of matmuls."""

    def call(operator: str, **tensors: torch.Tensor) -> Call:
        attributes = {"epsilon": 1e-5} if operator == "quantized_norm" else {}
        return launcher(operator, context)(tensors, attributes, context)

    before, out, stream, mixed = (positive(rows, HIDDEN) for _ in range(4))
    quantized, middle = positive(rows, HIDDEN, dtype=FLOAT8), positive(rows, MID, dtype=FLOAT8)
    scales, made_scales = positive(rows, 1, dtype=FLOAT32), positive(rows, 1, dtype=FLOAT32)
    qkv, gate_up = positive(rows, SHAPES["qkv"][0]), positive(rows, 2 * MID)
    calls_of: dict[str, list[Call]] = {"norm": [], "swiglu": [], "rounding": [], "layer": []}
    for _ in range(LAYERS):
        weight_scales = {name: positive(width, dtype=FLOAT32) for name, (width, _) in SHAPES.items()}
        weights = {name: positive(*shape, dtype=FLOAT8).view(torch.uint8) for name, shape in SHAPES.items()}
        norm = call(
            "quantized_norm",
            skip=before,
            update=out,
            token_scales=scales,
            weight_scales=weight_scales["o"],
            norm_weight=positive(HIDDEN),
            quantized=quantized,
            scales=made_scales,
            sum=stream,
        )
        swiglu = call(
            "quantized_swiglu",
            gate_up=gate_up,
            token_scales=scales,
            weight_scales=weight_scales["gate, up"],
            quantized=middle,
            scales=made_scales,
        )
        rounding = call("quantize_tokens", x=mixed, quantized=quantized, scales=made_scales)
        first = call(
            "scaled_matmul",
            quantized=quantized,
            scales=made_scales,
            weight=weights["qkv"],
            weight_scales=weight_scales["qkv"],
            out=qkv,
        )
        o, gate_and_up, down = (
            call("float8_matmul", quantized=x, weight=weights[name], out=result)
            for name, x, result in (("o", quantized, out), ("gate, up", quantized, gate_up), ("down", middle, out))
        )
        calls_of["norm"].append(norm)
        calls_of["swiglu"].append(swiglu)
        calls_of["rounding"].append(rounding)
        calls_of["layer"] += [norm, first, rounding, o, norm, gate_and_up, swiglu, down]
    return tuple(best_us(run_all(calls), LAYERS) for calls in calls_of.values())
