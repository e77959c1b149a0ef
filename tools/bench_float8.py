"""Measure products in float8 on a CUDA device, in microseconds by replay of a CUDA graph, at the shapes of an 8B Llama.

python -m tools.bench_float8                     # the products, and what stands between them, at 1 to 2,048 rows

Products: in bfloat16 (torch.mm), and in float8 (torch._scaled_mm) with one scale per side, with one per row and output,
and with sums kept in fewer bits (use_fast_accum), whose error is told beside that of whole sums; last by the algorithm
that operators take, where it is chosen among those of cuBLASLt. Between them: the
operators of a layer in float8, and that layer as a whole without its attention. Weights are more than fit the
second-level cache.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tandemrt.plugins.faces import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.fastest_product import MOST_ROWS, FastestProduct
from tandemrt.plugins.kernels.float8_product import FEW
from tandemrt.plugins.launch import Call, Context
from tools.bench_attention import COLD, replay

HIDDEN, MID = 4096, 14_336
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate, up": (2 * MID, HIDDEN), "down": (HIDDEN, MID)}
HEAD = {"head": (128_256, HIDDEN)}
FLOAT8, WIDE, EXACT = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def numbers(*shape: int, dtype: torch.dtype = WIDE) -> torch.Tensor:
    """Random, and none of them nothing."""
    return torch.rand(shape, device="cuda").add_(0.1).to(dtype)


def forms(width: int, inner: int, rows: int, context: Context) -> tuple[str, ...]:
    """A product in each form."""
    copies = max(2, int(COLD / (width * inner)) + 1)
    weights = [numbers(width, inner, dtype=FLOAT8) for _ in range(copies)]
    whole = [weight.to(WIDE) for weight in weights[: copies // 2 + 1]]
    x, out = numbers(rows, inner, dtype=FLOAT8), numbers(rows, width)
    wide, one = x.to(WIDE), numbers(1, dtype=EXACT)
    each = numbers(rows, 1, dtype=EXACT), numbers(1, width, dtype=EXACT)

    def mm() -> None:
        for weight in whole:
            torch.mm(wide, weight.t(), out=out)

    def scaled(by_row: torch.Tensor, by_output: torch.Tensor, *, fast: bool = False) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                torch._scaled_mm(x, weight.t(), by_row, by_output, out_dtype=WIDE, use_fast_accum=fast, out=out)

        return run

    def chosen() -> None:
        for product in products:
            product.run()

    ways = [scaled(one, one), scaled(one, one, fast=True), scaled(*each)]
    products = [FastestProduct(context, x, weight, out) for weight in weights] if FEW < rows <= MOST_ROWS else []
    ways += [chosen] if products else []
    return (f"{replay(mm, len(whole)):.1f}", *(f"{replay(way, copies):.1f}" for way in ways))


def errors(inner: int, *, signs: bool) -> tuple[str, ...]:
    """How far sums of ``inner`` products are from exact ones, relative (root mean square), and so with fast sums."""
    x, weight = (torch.randn(256, inner, device="cuda") for _ in range(2))
    x, weight = ((each if signs else each.abs()).to(FLOAT8) for each in (x, weight))
    exact, one = x.double() @ weight.double().t(), torch.ones(1, device="cuda")

    def error(*, fast: bool) -> str:
        found = torch._scaled_mm(x, weight.t(), one, one, out_dtype=EXACT, use_fast_accum=fast)
        return f"{((found - exact).norm() / exact.norm()).item():.1e}"

    return error(fast=False), error(fast=True)


def layer(rows: int, context: Context) -> tuple[str, ...]:
    """The operators between products, each alone, and a layer of them and of products."""

    def call(operator: str, **tensors: torch.Tensor) -> Call:
        attributes = {"epsilon": 1e-5} if operator == "quantized_norm" else {}
        return launcher(operator, context)(tensors, attributes, context)

    before, product, stream, mixed = (numbers(rows, HIDDEN) for _ in range(4))
    narrow, middle = numbers(rows, HIDDEN, dtype=FLOAT8), numbers(rows, MID, dtype=FLOAT8)
    scales, made_scales = numbers(rows, 1, dtype=EXACT), numbers(rows, 1, dtype=EXACT)
    qkv, gate_up = numbers(rows, SHAPES["qkv"][0]), numbers(rows, 2 * MID)
    found: dict[str, list[Call]] = {"norm": [], "swiglu": [], "round": [], "layer": []}
    count = 8
    for _ in range(count):
        of = {name: numbers(width, dtype=EXACT) for name, (width, _) in SHAPES.items()}
        weights = {name: numbers(*shape, dtype=FLOAT8).view(torch.uint8) for name, shape in SHAPES.items()}
        norm = call(
            "quantized_norm",
            skip=before,
            product=product,
            product_scales=scales,
            weight_scales=of["o"],
            norm_weight=numbers(HIDDEN),
            quantized=narrow,
            scales=made_scales,
            sum=stream,
        )
        swiglu = call(
            "quantized_swiglu",
            gate_up=gate_up,
            product_scales=scales,
            weight_scales=of["gate, up"],
            quantized=middle,
            scales=made_scales,
        )
        rounding = call("quantize_tokens", x=mixed, quantized=narrow, scales=made_scales)
        first = call(
            "scaled_product",
            quantized=narrow,
            scales=made_scales,
            weight=weights["qkv"],
            weight_scales=of["qkv"],
            product=qkv,
        )
        o, wide, down = (
            call("float8_product", quantized=x, weight=weights[name], product=made)
            for name, x, made in (("o", narrow, product), ("gate, up", narrow, gate_up), ("down", middle, product))
        )
        found["norm"].append(norm)
        found["swiglu"].append(swiglu)
        found["round"].append(rounding)
        found["layer"] += [norm, first, rounding, o, norm, wide, swiglu, down]

    def all_of(wanted: list[Call]) -> Callable[[], None]:
        def run() -> None:
            for each in wanted:
                each.run()

        return run

    return tuple(f"{replay(all_of(wanted), count):.1f}" for wanted in found.values())


def main(
    rows: Annotated[str, typer.Option(help="Rows of each line.")] = "1,5,16,64,80,320,2048",
    head: Annotated[bool, typer.Option(help="The head, too.")] = True,
) -> None:
    """Print the tables."""
    wanted, console = [int(each) for each in rows.split(",")], Console(width=140)
    context = Context(torch.device("cuda", torch.cuda.current_device()))
    forms_told = ("bfloat16", "float8", "fast sums", "a scale per row", "chosen")
    table = Table("product", "rows", *forms_told, title="microseconds")
    for name, (width, inner) in (SHAPES | (HEAD if head else {})).items():
        for count in wanted:
            if name not in HEAD or count <= 320:
                table.add_row(name, str(count), *forms(width, inner, count, context))
                torch.cuda.empty_cache()
    console.print(table)
    table = Table("inputs", "signs", "float8", "fast sums", title="relative error of sums")
    for inner in (HIDDEN, MID):
        for signs in (True, False):
            table.add_row(str(inner), "any" if signs else "one", *errors(inner, signs=signs))
    console.print(table)
    table = Table("rows", "norm", "swiglu", "rounding", "layer without attention", title="microseconds")
    with tempfile.TemporaryDirectory() as folder:
        major, minor = torch.cuda.get_device_capability()
        compile_kernels([f"{major}.{minor}"], Path(folder), names=["float8"], dtypes=["bfloat16"])
        context = Context(torch.device("cuda", torch.cuda.current_device()), Path(folder))
        for count in wanted:
            table.add_row(str(count), *layer(count, context))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
