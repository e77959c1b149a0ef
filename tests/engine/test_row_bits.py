"""On a CPU the operators of a decoder give a row the same bits alone, in a draft window and with other rows."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.constants import SILU_EXPERTS
from tandemrt.plugins.operators.launch import Context
from tests.engine import attention_cases
from tests.engine.implementation_cases import interleaved_weight, to_torch

ROWS, INNER, OUTER, EXPERTS = 7, 320, 160, 4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


BYTES = torch.from_numpy(np.random.default_rng(1).integers(0, 120, (OUTER, INNER)).astype(np.uint8))
# Operator: inputs by row, other inputs, attributes, name and width of the output.
MATMULS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, int]] = {
    "linear": ({"x": normal(ROWS, INNER)}, {"weight": normal(OUTER, INNER, seed=1)}, {}, "out", OUTER),
    "gated_linear": ({"x": normal(ROWS, INNER)}, {"weight": normal(2 * OUTER, INNER, seed=1)}, {}, "activated", OUTER),
    "float8_matmul": (
        {"quantized": normal(ROWS, INNER).to(torch.float8_e4m3fn)},
        {"weight": BYTES},
        {},
        "out",
        OUTER,
    ),
    "scaled_matmul": (
        {"quantized": normal(ROWS, INNER).to(torch.float8_e4m3fn), "scales": normal(ROWS, 1).abs()},
        {"weight": BYTES, "weight_scales": normal(OUTER, seed=2).abs()},
        {},
        "out",
        OUTER,
    ),
    "experts": (
        {"x": normal(ROWS, INNER), "router_logits": normal(ROWS, EXPERTS)},
        {"gate_up": normal(EXPERTS, 2 * OUTER, INNER, seed=1), "down": normal(EXPERTS, INNER, OUTER, seed=2)},
        {"per_token": 2, "normalized": 1, **SILU_EXPERTS},
        "mixed",
        INNER,
    ),
    "low_bit_int8_matmul": (
        {"x": normal(ROWS, INNER)},
        {
            "weight": torch.from_numpy(np.random.default_rng(1).integers(0, 256, (20, 1280)).astype(np.uint8)),
            "scales": normal(20, 80, seed=2),
        },
        {"bits": 4, "group_size": 32, "width": OUTER},
        "out",
        OUTER,
    ),
    "tiled_matmul": (
        {"x": normal(ROWS, INNER)},
        {"weight": normal(OUTER // 16, INNER * 16, seed=1)},
        {"width": OUTER},
        "out",
        OUTER,
    ),
}
BY_ROW = MATMULS | {
    "swiglu": ({"gate_up": normal(ROWS, 2 * OUTER)}, {}, {}, "activated", OUTER),
    "residual_norm": (
        {"x": normal(ROWS, OUTER), "update": normal(ROWS, OUTER, seed=2), "sum": normal(ROWS, OUTER)},  # an output
        {"weight": normal(OUTER, seed=1)},
        {"epsilon": 1e-5},
        "normed",
        OUTER,
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("operator", BY_ROW)
def test_an_operator_gives_a_row_the_same_bits_in_any_number_of_rows(operator: str, threads: int) -> None:
    by_row, other, attributes, name, width = BY_ROW[operator]
    context = Context(torch.device("cpu"), threads=threads)

    def computed(first: int, end: int) -> np.ndarray:
        out = torch.zeros(end - first, width)
        rows = {key: tensor[first:end].contiguous() for key, tensor in by_row.items()}
        launcher(operator, context)({**rows, **other, name: out}, attributes, context).run()
        return out.numpy()

    together = computed(0, ROWS)
    assert np.isfinite(together).all()
    for first, end in [*((row, row + 1) for row in range(ROWS)), (0, 2), (1, 6)]:
        np.testing.assert_array_equal(computed(first, end), together[first:end], f"rows {first} to {end}")


def hold_in_calls_of_every_size(
    operator: str, x: torch.Tensor, tensors: dict[str, torch.Tensor], attributes: dict[str, int], sizes: Iterable[int]
) -> None:
    """Assert that calls of the first rows of ``x`` give the bits of calls of one row, and write no other row."""
    context = Context(torch.device("cpu"), threads=1)

    def computed(first: int, end: int) -> np.ndarray:
        out = torch.full((end - first + 1, attributes["width"]), torch.pi)  # the last row is not the call's
        rows = {"x": x[first:end], "out": out[:-1]}
        launcher(operator, context)({**rows, **tensors}, attributes, context).run()
        assert (out[-1] == torch.pi).all()
        return out[:-1].numpy()

    alone = np.concatenate([computed(row, row + 1) for row in range(len(x))])
    for size in sizes:
        np.testing.assert_array_equal(computed(0, size), alone[:size], f"{size} rows")


@pytest.mark.parametrize("width", [16, 48, 70])  # one tile, an odd number, a last one that is not full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tiled_matmul_gives_a_row_the_same_bits_in_calls_of_every_size(dtype: torch.dtype, width: int) -> None:
    """The kernel takes a lone row, few rows and many rows otherwise, and long rows in parts."""
    inner, rows = 1600, 200
    weight = normal(-(-width // 16), inner * 16, seed=1).to(dtype)
    sizes = [*range(2, 27), 192, 193, rows]
    hold_in_calls_of_every_size("tiled_matmul", normal(rows, inner), {"weight": weight}, {"width": width}, sizes)


@pytest.mark.parametrize(
    ("bits", "width", "more"),
    [
        *((4, width, ()) for width in (8, 24, 70)),  # widths as above
        (4, 24, ("table", "subscales")),
        (5, 24, ("offsets", "subscales", "suboffsets")),
        (6, 24, ("subscales",)),
        (8, 24, ()),
    ],
)
def test_a_low_bit_int8_matmul_gives_a_row_the_same_bits_in_calls_of_every_size(
    bits: int, width: int, more: tuple[str, ...]
) -> None:
    rows, inner, group, rng = 42, 256, 16 if bits == 6 else 32, np.random.default_rng(1)
    per_scale = 8 if "subscales" in more else 1
    weight = interleaved_weight(rng, width, inner, group, bits, more=more, groups_per_scale=per_scale)
    tensors = {name: to_torch(array) for name, array in weight.items()}
    attributes = {"bits": bits, "group_size": group, "width": width}
    hold_in_calls_of_every_size("low_bit_int8_matmul", normal(rows, inner), tensors, attributes, range(2, rows + 1))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (2, 1)])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_attention_gives_a_token_the_same_bits_in_any_call(
    head_dim: int, heads: int, kv_heads: int, threads: int
) -> None:
    """A text of 9 tokens after 250: in windows of every size, in runs of every size, and with a longer neighbour."""
    cached, new = 250, 9
    context = Context(torch.device("cpu"), threads=threads)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    tensors = {
        key: None if value is None else to_torch(value)
        for key, value in attention_cases.case([cached], new, max_blocks=9, **sizes).items()
    }
    attention = attention_cases.attributes(head_dim=head_dim) | {"heads": heads, "kv_heads": kv_heads}
    empty = {key: tensors[key] for key in attention_cases.PROMPTS}
    qkv, table = tensors["qkv"], tensors["block_table"]
    key_cache, value_cache = (torch.nan_to_num(tensors[key]) for key in ("key_cache", "value_cache"))

    def call(tokens: torch.Tensor, at: list[int], tables: torch.Tensor, prompts: dict[str, Any]) -> torch.Tensor:
        mixed = torch.zeros(len(tokens), heads * head_dim)
        bound = {key: value for key, value in tensors.items() if value is not None} | prompts
        bound |= {"qkv": tokens.contiguous(), "block_table": tables, "write_index": torch.tensor(at)}
        bound |= {"key_cache": caches[0], "value_cache": caches[1], "mixed": mixed}
        launcher("window_attention", context)(bound, attention, context).run()
        return mixed

    def in_windows(size: int, neighbour: int | None) -> torch.Tensor:
        parts = []
        for first in range(0, new, size):
            tokens, at, tables = qkv[first : first + size], [cached + first], table
            if neighbour is not None:  # it reads and writes the scratch block
                at, tables = [*at, neighbour], torch.cat([table, torch.zeros_like(table)])
                tokens = torch.cat([tokens, tokens])
            parts.append(call(tokens, at, tables, empty)[: min(size, new - first)])
        return torch.cat(parts)

    def in_runs(size: int) -> torch.Tensor:
        parts = []
        for first in range(0, new, size):
            tokens = qkv[first : first + size]
            prompts = {
                "prompt_rows": torch.zeros(len(tokens), dtype=torch.int32),
                "prompt_starts": torch.tensor([0, len(tokens)], dtype=torch.int32),
                "prompt_index": torch.tensor([cached + first]),
                "prompt_table": table,
            }
            both = torch.cat([qkv[:1], tokens])  # a window of a free slot precedes the run
            parts.append(call(both, [0], torch.zeros_like(table), prompts)[1:])
        return torch.cat(parts)

    results = []
    for compute in [
        lambda: in_windows(new, None),
        *((lambda size=size: in_windows(size, None)) for size in (1, 2, 5)),
        *((lambda size=size: in_windows(size, 500)) for size in (1, 3)),
        *((lambda size=size: in_runs(size)) for size in (1, 2, new)),
    ]:
        caches = key_cache.clone(), value_cache.clone()
        results.append(compute().numpy())
    assert np.isfinite(results[0]).all()
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result, results[0], f"way {number}")
