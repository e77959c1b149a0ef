"""Case ``experts``: a mixture of experts at Qwen3-30B-A3B's shape with random routers.

python -m tools.bench.kernels experts                    # 1 to 2,048 rows

A line has the number of experts that any row chose, the time to read their weights once, the implementation that the
operator chooses without batch invariance and its time, and the time of another one: of grouped matmuls, or in place of
these of inputs added in order. With ``--quantized`` a second table has the times for quantized weights; their floor is
that of 4 bits with a scale per 128 inputs.
"""

from typing import Annotated

import torch
import typer

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.kernels.experts import ExpertsCall
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture
from tandemrt.plugins.kernels.experts_ordered import OrderedMixture
from tandemrt.plugins.operators.constants import SILU_EXPERTS
from tandemrt.plugins.operators.int4_layout import padded_inner, scales_of_output
from tandemrt.plugins.operators.launch import Call, Context
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import bandwidth, best_us, run_all
from tools.bench.options import Rows, integers
from tools.bench.report import Json, Report, Row

LAYERS = 3  # their weights exceed the second-level cache
FORMS = {  # numbers, and inputs that share a scale
    "FP8": ("float8", 128),
    "int8": ("int8", 128),
    "int4": ("int4", 128),
    "NVFP4": ("float4", 16),
    "MXFP4": ("float4", 32),
}
WAYS = {ExpertsCall: "streamed", OrderedMixture: "in order", GroupedMixture: "grouped"}
COLUMNS = {"rows": "", "experts": ".1f", "floor": ".0f", "way": "", "operator": ".1f", "another way": ".1f"}


def main(
    rows: Rows = "1,2,4,5,8,16,40,80,160,320,512,1024,2048",
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 128,
    chosen: Annotated[int, typer.Option(help="Experts that a row chooses.")] = 8,
    hidden: Annotated[int, typer.Option(help="Hidden size of a row.")] = 2048,
    width: Annotated[int, typer.Option(help="Intermediate size of an expert.")] = 768,
    quantized: Annotated[bool, typer.Option(help="Time quantized weights as well.")] = False,
    out: Json = None,
) -> None:
    """Time a mixture of experts."""
    lines: list[Row] = []
    low_bit: list[Row] = []
    names = ["experts", "swiglu", *({f"experts_{numbers}" for numbers, _ in FORMS.values()} if quantized else ())]
    with compiled_kernels(*names, dtypes=["bfloat16"]) as context, torch.inference_mode():
        for count in integers(rows):
            lines.append(_line(count, experts, chosen, hidden, width, context))
            torch.cuda.empty_cache()
            if quantized:
                low_bit.append(_low_bit_line(count, experts, chosen, hidden, width, context))
    report = Report(out)
    report.add("microseconds", COLUMNS, lines)
    if quantized:
        columns = {"rows": "", "experts": ".1f"} | dict.fromkeys(("floor", *FORMS), ".1f")
        report.add("microseconds, quantized", columns, low_bit)


def _line(rows: int, experts: int, chosen: int, hidden: int, width: int, context: Context) -> Row:
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
    attributes = {"per_token": chosen, "normalized": 1, **SILU_EXPERTS}
    used = [len(each["router_logits"].topk(chosen)[1].unique()) for each in layers]
    floor = 1e6 * sum(used) / LAYERS * 3 * hidden * width * 2 / bandwidth()
    by_operator = [launcher("experts", context)(each, attributes, context) for each in layers]
    way = WAYS[type(by_operator[0])]
    another = OrderedMixture if way == "grouped" else GroupedMixture
    by_another: list[Call] = [another(each, attributes, context) for each in layers]
    times = [best_us(run_all(calls), LAYERS) for calls in (by_operator, by_another)]
    return (rows, sum(used) / LAYERS, floor, way, *times)


def _low_bit_line(rows: int, experts: int, chosen: int, hidden: int, width: int, context: Context) -> Row:
    logits = torch.randn(rows, experts, generator=torch.Generator("cuda").manual_seed(rows), device="cuda")
    used = len(set(logits.topk(chosen)[1].flatten().tolist()))
    floor = 1e6 * used * 3 * hidden * width * (1 / 2 + 2 / 128) / bandwidth()
    times = []
    for numbers, group in FORMS.values():
        calls = [
            _low_bit_call(numbers, group, logits.to(torch.bfloat16), chosen, hidden, width, context)
            for _ in range(LAYERS * (1 if numbers.endswith("8") else 2))
        ]
        times.append(best_us(run_all(calls), len(calls)))
        del calls
        torch.cuda.empty_cache()
    return (rows, used, floor, *times)


def _low_bit_call(
    numbers: str, group: int, logits: torch.Tensor, chosen: int, hidden: int, width: int, context: Context
) -> Call:
    """Bind the operator to random weights, whose results no other kernel reads."""
    rows, experts = logits.shape
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    tensors = {"x": x, "router_logits": logits, "mixed": torch.empty_like(x)}
    bits = 8 if numbers.endswith("8") else 4
    for name, outputs, inner in (("gate_up", 2 * experts * width, hidden), ("down", experts * hidden, width)):
        padded = padded_inner(inner)
        tensors[name] = torch.randint(0, 120, (outputs, padded * bits // 8), dtype=torch.uint8, device="cuda")
        groups = padded // group if numbers == "float8" else scales_of_output(inner, group)
        scales = torch.rand(outputs, groups, device="cuda") / 1000
        if numbers == "float4":
            tensors[f"{name}_scales"] = (scales * 1e5).to(torch.uint8)
            tensors[f"{name}_factors"] = torch.rand(outputs, device="cuda") / 1000
        else:
            tensors[f"{name}_scales"] = scales if numbers == "float8" else scales.to(torch.bfloat16)
    routing = {"per_token": chosen, "normalized": 1, **SILU_EXPERTS, "gate_up_group": group, "down_group": group}
    return launcher(f"{numbers}_experts", context)(tensors, routing, context)
