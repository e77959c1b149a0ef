"""Cases of batch-invariant window_attention on a CPU: the kernel of few rows, and that of any number of them."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.attention_plan import BLOCK, Plan
from tests.engine.attention_cases import attributes, case, expected
from tests.host_kernels.library import DTYPES, allow, at_end, equal, require_near

HEAD_DIM = 128
_KV_HEADS, _BLOCK, _LENGTHS = 2, 64, (1, 63, 300)  # cached tokens of three texts
_FEW, _MANY = ("attend_few", 1), [("attend_fixed", splits) for splits in (1, 2, 4)]  # and how many blocks share keys
_CALL = ("qkv", "key_cache", "value_cache", "block_table", "write_index")
_INPUTS = (*_CALL, "cosine", "sine", "q_norm", "k_norm", "sinks")
_WITHIN = {"bf16": 2.0**-5, "fp16": 2.0**-8}


@dataclass(frozen=True)
class FewRowsCase:
    """Operands of one call of windows of ``query`` tokens, in row tiles of ``rows``."""

    dtype: str
    heads: int
    query: int
    rows: int
    sliding_window: int
    more: bool

    def check(self, library: Any) -> None:
        """Raise AssertionError, which names the case, for a difference."""
        sizes = {"heads": self.heads, "kv_heads": _KV_HEADS, "head_dim": HEAD_DIM}
        of_dtype = {"dtype": DTYPES[self.dtype], "norm": self.more, "sinks": self.more}
        tensors = case(_LENGTHS, self.query, block_size=_BLOCK, **sizes, **of_dtype)
        mixed, *_ = expected(tensors, attributes(sliding_window=self.sliding_window, **sizes))
        few = self._results(library, tensors, *_FEW)
        require_near(few[0], mixed.astype(np.float64), f"{self}", _WITHIN[self.dtype])
        for kernel, splits in _MANY if self.rows > 16 else []:
            many = self._results(library, tensors, kernel, splits)
            assert all(map(equal, many, few)), f"{self}: other bits by {kernel} with {splits} blocks"

    def _results(
        self, library: Any, tensors: dict[str, np.ndarray | None], kernel: str, splits: int
    ) -> tuple[np.ndarray, ...]:
        """Run a kernel that writes new keys and values; return what it mixed, and both caches."""
        t = {name: None if tensor is None else at_end(tensor) for name, tensor in tensors.items()}
        allow(library, [tensor for tensor in t.values() if tensor is not None])
        batch, positions = t["block_table"].shape
        plan = Plan(batch, _KV_HEADS, HEAD_DIM, self.rows, 1, splits, clustered=False, fixed=True)
        mixed = at_end(np.zeros((batch * self.query, self.heads * HEAD_DIM), DTYPES[self.dtype]))
        parts = (at_end(np.full((plan.parts, n), np.nan, np.float32)) for n in (HEAD_DIM, 2))
        outputs = (mixed, t["key_cache"], t["value_cache"], *parts, at_end(np.zeros(plan.shared_rows, np.int32)))
        inputs = [t[name] for name in _INPUTS]
        sizes = (self.query, self.heads, _KV_HEADS, _BLOCK, positions, self.sliding_window, _KV_HEADS, 0, splits, 1)
        before, after = ([0 if each is None else each.ctypes.data for each in side] for side in (inputs, outputs))
        numbers = (ctypes.c_uint64 * 32)(*before, *sizes, *after)
        floats = (ctypes.c_float * 4)(HEAD_DIM**-0.5, 1e-6, 1, 1)
        function = ctypes.cast(getattr(library, f"{kernel}_{self.dtype}_{HEAD_DIM}_{self.rows}"), ctypes.c_void_p)
        library.call(function, numbers, floats, *plan.grid, BLOCK[0], plan.shared)
        return outputs[:3]


def few_rows_cases() -> Iterator[FewRowsCase]:
    """Yield cases of one and two rows per thread, of several tokens per warp, with norms and sinks, sliding or not."""
    for dtype in DTYPES:
        yield FewRowsCase(dtype, 16, 1, 64, 0, more=True)
        yield FewRowsCase(dtype, 6, 5, 32, 70, more=True)
        yield FewRowsCase(dtype, 2, 13, 32, 0, more=False)
        yield FewRowsCase(dtype, 16, 2, 16, 0, more=False)
