"""Case ``layer``: the kernels of a decoder layer in their order, and what each of them costs there.

python -m tools.bench.kernels layer                                          # a layer of an 8B Llama
python -m tools.bench.kernels layer --hidden 8192 --heads 32 --kv-heads 4    # of a 70B, what one of two ranks has

A kernel costs the time of the layer less that of a layer without the kernel. Kernels begin while the previous one ends,
so these costs are not the kernels' own times, and do not add up to the layer's. Ranks exchange nothing here.
"""

import math
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from tandemrt.plugins.kernels import linear, residual_norm, swiglu
from tandemrt.plugins.operators.launch import Call, Context
from tools.bench.kernels.attention import Shape, window_calls
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import COLD, bandwidth, best_us, run_all
from tools.bench.options import Batch, Cached, New
from tools.bench.report import Json, Report, Row

KINDS = ("residual_norm", "attention", "swiglu", "qkv", "o", "gate, up", "down")
COLUMNS = {"batch": "", "new": "", "weights": ".1f", "layer": ".1f"} | dict.fromkeys(KINDS, ".1f")


def main(
    batch: Batch = None,
    new: New = None,
    context: Cached = 1000,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 4096,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 14_336,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    out: Json = None,
) -> None:
    """Time a batch-invariant layer in bfloat16, and the same without one kind of kernel."""
    windows = new or [1, 5]
    lines: list[Row] = []
    names = ("attention", "linear", "residual_norm", "swiglu")
    with compiled_kernels(*names, dtypes=["bfloat16"], head_dims=[head_dim]) as compiled:
        launch_context = replace(compiled, sizes={"window+1": max(windows), "query": 2048}, batch_invariant=True)
        for rows in batch or (1, 16, 64):
            for tokens in windows:
                bf16 = torch.bfloat16
                shape = Shape(rows, tokens, context, heads, kv_heads, head_dim, bf16, bf16, runs=False)
                layer = Layer(shape, hidden, intermediate, launch_context)
                whole = layer.microseconds()
                costs = [whole - layer.microseconds(without=kind) for kind in KINDS]
                lines.append((rows, tokens, layer.nbytes / bandwidth() * 1e6, whole, *costs))
                del layer
                torch.cuda.empty_cache()
    title = (
        f"microseconds of a layer: hidden {hidden}, intermediate {intermediate}, {heads} heads, {kv_heads} KV heads of "
        f"{head_dim}, {context} tokens cached; of reading its weights; and what each kind of kernel costs"
    )
    Report(out).add(title, COLUMNS, lines)


class Layer:
    """The kernels of several layers, whose weights together exceed the second-level cache of the GPU."""

    def __init__(self, shape: Shape, hidden: int, intermediate: int, context: Context) -> None:
        tokens, mixed = shape.batch * shape.new, shape.heads * shape.head_dim
        matmuls = {
            "qkv": (hidden, mixed + 2 * shape.kv_heads * shape.head_dim),
            "o": (mixed, hidden),
            "gate, up": (hidden, 2 * intermediate),
            "down": (intermediate, hidden),
        }
        self.nbytes = sum(2 * inner * width for inner, width in matmuls.values())
        self._count = max(2, math.ceil(COLD / self.nbytes))
        inputs = {name: shape.normal(tokens, inner) for name, (inner, _) in matmuls.items()}
        results = {name: shape.normal(tokens, width) for name, (_, width) in matmuls.items()}
        stream, update, normed = (shape.normal(tokens, hidden) for _ in range(3))
        norm: dict[str, Any] = {"x": stream, "sum": stream, "update": update, "normed": normed}
        norm["weight"] = torch.ones(hidden, device="cuda")
        gated = {"gate_up": results["gate, up"], "activated": inputs["down"]}
        self._calls: list[tuple[str, Call]] = []
        for attention in window_calls(shape, context, self._count):
            bound: dict[str, Call] = {
                "residual_norm": residual_norm.launch(norm, {"epsilon": 1e-5}, context),
                "attention": attention,
                "swiglu": swiglu.launch(gated, {}, context),
            }
            for name, (inner, width) in matmuls.items():
                tensors = {"x": inputs[name], "weight": shape.normal(width, inner), "out": results[name]}
                bound[name] = linear.launch(tensors, {}, context)
            order = ("residual_norm", "qkv", "attention", "o", "residual_norm", "gate, up", "swiglu", "down")
            self._calls += [(name, bound[name]) for name in order]

    def microseconds(self, without: str = "") -> float:
        """Return the time of one layer, without the kernels of one kind."""
        return best_us(run_all([call for kind, call in self._calls if kind != without]), self._count)
