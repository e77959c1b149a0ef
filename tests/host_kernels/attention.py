"""Cases of window_attention with heads of 512 values on a CPU, for GPUs with more and less shared memory."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.attention_wide_plan import WIDE_BLOCK, WidePlan
from tandemrt.plugins.operators.constants import WIDE_HEAD_DIM
from tandemrt.plugins.reference import window_attention
from tests.host_kernels.library import DTYPES, allow, at_end, equal, require_near

ATTENTION = "attention"
DEFINES = ("SELECTED", "BF16=1", "FP16=1", f"HEAD_{WIDE_HEAD_DIM}=1")
_BLOCK, _TABLE = 64, 6  # positions of a cache block, blocks of a text
_KV_HEADS, _SMS = 2, 132
_H200, _A100, _L40 = 232_448, 166_912, 101_376  # bytes of shared memory of a thread block
_WAYS = ((_H200, 8), (_H200, 1), (_A100, 8), (_L40, 1))  # with the number of splits
_WARPS, _PREPARED, _LOG2_E = 4, 4, 1.4426950408889634
_LENGTHS, _RUNS = (1, 300), ((0, 70), (130, 3))  # cached tokens of windows; cached and new tokens of prompts
_WITHIN = {"bf16": 2.0**-5, "fp16": 2.0**-8}  # queries, weights and results are rounded
_SCALE, _EPSILON = WIDE_HEAD_DIM**-0.5, 1e-6


@dataclass(frozen=True)
class AttentionCase:
    """Operands of one call, with windows and prompt runs. Cache entries without a token are NaN."""

    dtype: str
    heads: int
    sliding_window: int
    tensors: dict[str, np.ndarray]

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        how: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": _KV_HEADS,
            "scale": _SCALE,
            "sliding_window": self.sliding_window,
        }
        expected, *_ = window_attention(**self.tensors | how)
        what = (
            f"attention {self.dtype}, {self.heads} heads, sliding window {self.sliding_window}, {sorted(self.tensors)}"
        )
        results = [self._mixed(library, memory, splits) for memory, splits in _WAYS]
        require_near(results[0], expected.astype(np.float64), what, _WITHIN[self.dtype])
        assert all(equal(result, results[0]) for result in results[1:]), f"{what}: other splits or tiles, other bits"

    def _mixed(self, library: Any, shared_memory: int, splits: int) -> np.ndarray:
        """Run the kernels that plugins/kernels/attention.py launches."""
        t = {name: at_end(tensor) for name, tensor in self.tensors.items()}
        allow(library, t.values())
        of_prompts, batch, runs = len(t["prompt_rows"]), len(t["write_index"]), len(t["prompt_index"])
        windows, group = len(t["qkv"]) - of_prompts, self.heads // _KV_HEADS
        query, mixed = windows // batch, np.zeros((len(t["qkv"]), self.heads * WIDE_HEAD_DIM), DTYPES[self.dtype])
        queries, caches = at_end(mixed[windows:]), (t["key_cache"], t["value_cache"])

        place = [t[name] for name in ("prompt_rows", "prompt_starts", "prompt_index", "prompt_table")]
        inputs, sizes = self._inputs(t, t["qkv"][windows:], place), self._sizes(of_prompts)
        grid = (-(-of_prompts * -(-(self.heads + 2 * _KV_HEADS) // _PREPARED) // _WARPS), 1, 1)
        self._run(library, "prepare", inputs, (*sizes, runs), (queries, *caches, None), grid, scale=_SCALE * _LOG2_E)
        plan = WidePlan.of_runs(runs=runs, lines=of_prompts * group, kv_heads=_KV_HEADS, shared_memory=shared_memory)
        sizes = (*sizes, runs, plan.buffers)
        outputs: tuple[np.ndarray, ...] = (mixed[windows:], *caches)
        self._run(library, "attend_runs", self._inputs(t, queries, place), sizes, outputs, plan.grid, plan)

        inputs, sizes = self._inputs(t, t["qkv"], [t["block_table"], t["write_index"]]), self._sizes(query)
        self._run(library, "append", inputs, sizes, caches, (-(-query * _KV_HEADS // _WARPS), batch, 1))
        plan = WidePlan.of_windows(
            batch=batch,
            lines=query * group,
            kv_heads=_KV_HEADS,
            sm_count=_SMS,
            shared_memory=shared_memory,
            splits=splits,
        )
        sums, bounds = (at_end(np.full((plan.parts, n), np.nan, np.float32)) for n in (WIDE_HEAD_DIM, 2))
        tickets = at_end(np.zeros(plan.shared_rows, np.int32))
        outputs = (mixed, *caches, sums, bounds, tickets)
        self._run(library, "attend", inputs, (*sizes, plan.splits, plan.buffers), outputs, plan.grid, plan)
        return mixed

    @staticmethod
    def _inputs(
        tensors: Mapping[str, np.ndarray], first: np.ndarray, place: Sequence[np.ndarray]
    ) -> tuple[np.ndarray | None, ...]:
        more = (tensors.get(name) for name in ("cosine", "sine", "q_norm", "k_norm", "sinks"))
        return (first, tensors["key_cache"], tensors["value_cache"], *place, *more)

    def _sizes(self, tokens: int) -> tuple[int, ...]:
        return (tokens, self.heads, _KV_HEADS, _BLOCK, _TABLE, self.sliding_window, _KV_HEADS, 0)

    def _run(
        self,
        library: Any,
        name: str,
        inputs: Sequence[np.ndarray | None],
        sizes: Sequence[int],
        outputs: Sequence[np.ndarray | None],
        grid: tuple[int, int, int],
        plan: WidePlan | None = None,
        scale: float = _SCALE,
    ) -> None:
        """Run a kernel whose arguments are addresses, integers, four floats, and addresses."""
        threads, shared, tile = (32 * _WARPS, 0, "") if plan is None else (WIDE_BLOCK[0], plan.shared, f"_{plan.rows}")
        kernel = getattr(library, f"{name}_{self.dtype}_{WIDE_HEAD_DIM}{tile}")
        addresses = ([0 if each is None else each.ctypes.data for each in side] for side in (inputs, outputs))
        before, after = addresses
        numbers = (ctypes.c_uint64 * 32)(*before, *sizes, *after)
        floats = (ctypes.c_float * 4)(scale, _EPSILON, 1, 1)
        library.call(ctypes.cast(kernel, ctypes.c_void_p), numbers, floats, *grid, threads, shared)


def attention_cases() -> Iterator[AttentionCase]:
    """Yield cases with few and many rows per KV head, with norms and sinks, sliding or not."""
    for dtype in DTYPES:
        for heads, query, sliding_window, more in ((16, 1, 0, False), (16, 3, 0, True), (6, 5, 70, True)):
            yield AttentionCase(dtype, heads, sliding_window, _tensors(DTYPES[dtype], heads, query, more))


def _tensors(dtype: np.dtype, heads: int, query: int, more: bool) -> dict[str, np.ndarray]:
    """Return the operands; ``more``: with norms and sinks."""
    rng, texts = np.random.default_rng(heads + query), len(_LENGTHS) + len(_RUNS)
    table = (1 + rng.permutation(texts * _TABLE)).reshape(texts, _TABLE).astype(np.int32)
    caches = [np.full((1 + texts * _TABLE, _KV_HEADS, _BLOCK, WIDE_HEAD_DIM), np.nan, dtype) for _ in range(2)]
    counts, cached = [new for _, new in _RUNS], [*_LENGTHS, *(length for length, _ in _RUNS)]
    for blocks, length in zip(table, cached, strict=True):
        at = np.arange(length)
        for cache in caches:
            numbers = rng.normal(size=(length, _KV_HEADS, WIDE_HEAD_DIM))
            cache[blocks[at // _BLOCK], :, at % _BLOCK] = numbers.astype(dtype)
    angles = rng.uniform(0, 2 * np.pi, (_TABLE * _BLOCK, WIDE_HEAD_DIM // 2))
    tokens = len(_LENGTHS) * query + sum(counts)
    tensors = {
        "qkv": rng.normal(size=(tokens, (heads + 2 * _KV_HEADS) * WIDE_HEAD_DIM)).astype(dtype),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table[: len(_LENGTHS)],
        "write_index": np.array(_LENGTHS, np.int64),
        "prompt_rows": np.repeat(np.arange(len(_RUNS), dtype=np.int32), counts),
        "prompt_starts": np.cumsum([0, *counts], dtype=np.int32),
        "prompt_index": np.array([length for length, _ in _RUNS], np.int64),
        "prompt_table": table[len(_LENGTHS) :],
        "cosine": np.cos(angles).astype(dtype),
        "sine": np.sin(angles).astype(dtype),
    }
    if more:
        norms = {name: (1 + rng.normal(size=WIDE_HEAD_DIM) / 4).astype(dtype) for name in ("q_norm", "k_norm")}
        tensors |= norms | {"sinks": rng.normal(size=heads).astype(np.float32)}
    return tensors
