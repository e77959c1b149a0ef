"""Case ``recurrence``: the ``linear_attention`` operator, with the heads of Qwen3.5-9B or of Mamba-2.

python -m tools.bench.kernels recurrence                     # draft windows: bfloat16, 4 drafts of which 2 are accepted
python -m tools.bench.kernels recurrence --batch 64 --new 1 --replayed 1
python -m tools.bench.kernels recurrence --runs --batch 1 --new 1000
python -m tools.bench.kernels recurrence --mamba

Times are microseconds per layer. The floor is the time to read and write the states once.
"""

import math
from typing import Annotated, Any

import torch
import typer

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.constants import OutputNorm
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.operators.projections import Projections
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import COLD, bandwidth, best_us, run_all
from tools.bench.options import Batch, New, Runs
from tools.bench.report import Json, Report, Row

KERNEL, START = 4, 100  # tokens of the convolution, and before the call
COLUMNS = {"batch": "", "new": "", "replayed": "", "floor": ".1f", "linear_attention": ".1f", "/ floor": ".2f"}


def main(
    batch: Batch = None,
    new: New = None,
    replayed: Annotated[int | None, typer.Option(help="Tokens that a row replays. Default: half.")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the projected values.")] = "bfloat16",
    mamba: Annotated[bool, typer.Option(help="Mamba-2 with 64 heads of 64 values and 8 groups.")] = False,
    runs: Runs = False,
    out: Json = None,
) -> None:
    """Time a recurrent layer between its matmuls."""
    lines: list[Row] = []
    with compiled_kernels("linear_attention", dtypes=[dtype], head_dims=[128]) as context:
        for rows in batch or (1, 16, 64):
            for tokens in new or (1, 5):
                before = -(-tokens // 2) if replayed is None else replayed
                tensors, attributes = _call(rows, tokens, before, getattr(torch, dtype), mamba=mamba, runs=runs)
                state = tensors["state"]
                layers = min(64, max(2, math.ceil(COLD / state.nbytes)))
                calls: list[Call] = [
                    launcher("linear_attention", context)(
                        tensors | {"state": torch.zeros_like(state)}, attributes, context
                    )
                    for _ in range(layers)
                ]
                taken, floor = best_us(run_all(calls), len(calls)), 2e6 * state.nbytes / bandwidth()
                lines.append((rows, tokens, before, floor, taken, taken / floor))
                torch.cuda.empty_cache()
    Report(out).add(f"microseconds per layer, {'Mamba-2' if mamba else 'delta net'}, {dtype}", COLUMNS, lines)


def _call(
    rows: int, new: int, replayed: int, dtype: torch.dtype, *, mamba: bool, runs: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and attributes of a call in which every row has ``new`` tokens after those it replays."""
    key_heads, value_heads, value_dim = (8, 64, 64) if mamba else (16, 32, 128)
    keys, values = key_heads * 128, value_heads * value_dim
    names = "query_at", "key_at", "value_at", "decay_at", "update_at", "gate_at"
    starts: tuple[int, ...] = (2 * values + keys, 2 * values, values, 2 * values + 2 * keys, -1, 0)
    if not mamba:
        first = 2 * value_heads
        starts = (first, first + keys, first + 2 * keys, 0, value_heads, first + 2 * keys + values)
    places = dict(zip(names, starts, strict=True))
    parts = Projections(key_heads, value_heads, 128, value_dim, value_heads, **places)

    def normal(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(of)

    def integers(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, device="cuda")

    windows, prompts = (0, rows) if runs else (rows, 0)
    ramp = torch.arange(prompts + 1, dtype=torch.int32, device="cuda")
    norm_groups, norm = (key_heads, OutputNorm.AFTER_GATE) if mamba else (value_heads, OutputNorm.BEFORE_GATE)
    tensors = {
        "projected": normal(rows * new, parts.pitch, of=dtype),
        "state": torch.zeros(rows, value_heads, 128, value_dim, device="cuda"),
        "recent": normal(rows, max(5, replayed) + KERNEL - 1, parts.width, of=dtype),
        "conv_weight": normal(parts.channels, KERNEL, of=dtype) / 2,
        "conv_bias": normal(parts.channels),
        "decay_scale": -normal(value_heads).exp(),
        "dt_bias": normal(value_heads),
        "skip": normal(value_heads),
        "norm_weight": normal(values if mamba else value_dim),
        "state_index": integers(windows, START - replayed),
        "write_index": integers(windows, START),
        "commit_index": integers(windows, START),
        "prompt_rows": ramp[:-1].repeat_interleave(new),
        "prompt_starts": new * ramp,
        "prompt_index": integers(prompts, START),
        "prompt_slots": torch.arange(prompts, device="cuda"),
        "prompt_state_index": integers(prompts, START - replayed),
        "out": torch.empty(rows * new, values, dtype=dtype, device="cuda"),
    }
    attributes: dict[str, Any] = {"key_heads": key_heads, "value_heads": value_heads, **places, "by_key_head": 0}
    attributes |= {"update_scale": 1.0, "sigmoid_gate": 0, "epsilon": 1e-6, "norm": int(norm)}
    return tensors, attributes | {"norm_groups": norm_groups}
