"""Case ``experts``: a mixture of experts at Qwen3-30B-A3B's shape with random routers.

python -m tools.bench_kernels experts                    # 1 to 2,048 rows

A line holds the number of experts that any row chose, the time to read their weights once, the time of the operator,
and the time of the implementation that the operator did not choose (streamed or grouped matmuls).
"""

from typing import Annotated

import torch
import typer

from tandemrt.plugins.kernels.experts import Mixture
from tandemrt.plugins.kernels.experts_grouped import GroupedMixture, fill_groups, has_groups
from tandemrt.plugins.operators.launch import Context
from tools.bench_kernels.compiled import compiled_kernels
from tools.bench_kernels.replay import bandwidth, best_us
from tools.bench_kernels.rows import Rows, counts
from tools.report import Json, Report, Row

LAYERS = 3  # their weights exceed the second-level cache
COLUMNS = {"rows": "", "experts": ".1f", "floor": ".0f", "way": "", "operator": ".1f", "the other way": ".1f"}


def main(
    rows: Rows = "1,2,4,5,8,16,40,80,160,320,512,1024,2048",
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 128,
    chosen: Annotated[int, typer.Option(help="Experts that a row chooses.")] = 8,
    hidden: Annotated[int, typer.Option(help="Hidden size of a row.")] = 2048,
    width: Annotated[int, typer.Option(help="Intermediate size of an expert.")] = 768,
    out: Json = None,
) -> None:
    """Time a mixture of experts."""
    lines: list[Row] = []
    with compiled_kernels("experts", "swiglu", dtypes=["bfloat16"]) as context, torch.inference_mode():
        for count in counts(rows):
            lines.append(_line(count, experts, chosen, hidden, width, context))
            torch.cuda.empty_cache()
    Report(out).add("microseconds", COLUMNS, lines)


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
    attributes = {"per_token": chosen, "normalized": 1}
    used = [len(each["router_logits"].topk(chosen)[1].unique()) for each in layers]
    floor = 1e6 * sum(used) / LAYERS * 3 * hidden * width * 2 / bandwidth()
    grouped = fill_groups(layers[0], chosen) and has_groups(layers[0]["x"], context)
    times = []
    for kind in (GroupedMixture, Mixture) if grouped else (Mixture, GroupedMixture):
        calls = [kind(each, attributes, context) for each in layers]

        def run(calls: list[Mixture | GroupedMixture] = calls) -> None:
            for call in calls:
                call.run()

        times.append(best_us(run, LAYERS))
    return (rows, sum(used) / LAYERS, floor, "grouped" if grouped else "streamed", *times)
