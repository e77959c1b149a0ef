"""Batch-invariant matmuls on a GPU: a row's result has the same bits for any number of rows.

cuBLASLt selects an algorithm by the number of rows, and may split an output's inputs over several thread blocks
(split-K). Nearly all algorithms without split-K give equal bits, and so does our kernel for few rows. None of this is
documented, so binding tries them on random rows and weights, and selects the fastest of those with equal bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.cublaslt import Algorithm, Matmul, MatmulCall
from tandemrt.plugins.kernels.few_rows import FewRowsMatmul
from tandemrt.plugins.kernels.float8_ordered import OrderedMatmul, Scales
from tandemrt.plugins.kernels.matmul_choices import Choices
from tandemrt.plugins.kernels.matmul_trials import MEASURED, Trials, random_like, random_rows, same_bits, workspace
from tandemrt.plugins.operators.launch import Call, Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_ROWS = 64  # rows of a trial, repeated
# microseconds that our kernels gain in a decoder over a trial: they read their weight while the previous kernel runs,
# and the next kernel begins while they run. A trial in float8 also begins without what the copy engine needs.
_READ_AHEAD, _READ_AHEAD_FLOAT8 = 2.0, 5.0
_REQUIRED_COUNTS = (1, 8, 256)  # rows that must have algorithms of equal bits; others are tried when bound


def launch(
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],  # noqa: ARG001
    context: Context,
) -> "BatchInvariantMatmul":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return BatchInvariantMatmul(context, tensors["x"], tensors["weight"], tensors["out"])


class BatchInvariantMatmul:
    """Bound matmul x [..., inner] @ weight.T, weight [width, inner], into out [..., width]. Capturable.

    A 2-dimensional ``out`` may be columns of a wider tensor, except of a float8 matmul. Unless ``applies_scales``, the
    caller applies ``scales`` of a float8 matmul to the result. The first bind for a number of rows waits for the
    device. Raises BackendUnavailable if no algorithms give equal bits.
    """

    def __init__(
        self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: Scales | None = None
    ) -> None:
        width, inner = weight.shape
        if x.shape[-1] != inner or out.shape != (*x.shape[:-1], width) or x.dtype != weight.dtype:
            raise ValueError(
                f"x: {weight.dtype}[..., {inner}] is needed for weight {tuple(weight.shape)} and out "
                f"{tuple(out.shape)}, got {x.dtype}{list(x.shape)}"
            )
        rows, results = x.view(-1, inner), out.view(-1, width)
        matmul = Matmul(rows, weight, results, workspace(context))
        key = f"linear {len(rows)} {list(weight.shape)} {weight.dtype} {out.dtype}"
        choose = partial(_algorithm, context, len(rows), weight, out.dtype)
        algorithm = context.get_or_create(key, lambda: Choices.of(context).get_or_try(key, matmul.supports, choose))
        self.applies_scales = scales is None or algorithm is None
        call = _few(context, rows, weight, results, scales) if algorithm is None else MatmulCall(matmul, algorithm)
        assert call is not None
        self._call: Call = call

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._call.run()


def _few(
    context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: Scales | None = None
) -> Call | None:
    """Bind our kernel for few rows; None if there is none for these."""
    if OrderedMatmul.serves(context, len(x), weight):
        return OrderedMatmul(context, x, weight, out, scales)
    return FewRowsMatmul(context, x, weight, out) if FewRowsMatmul.serves(context, len(x), weight) else None


@dataclass(frozen=True)
class _Trial:
    """Random ``rows`` [_ROWS, inner] and their expected results for random weights, [_ROWS, width].

    Weights of one shape and dtype share a trial.
    """

    rows: torch.Tensor
    wanted: torch.Tensor


def _algorithm(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm | None:
    """Return the fastest algorithm for ``count`` rows that gives the same bits as for other numbers of rows.

    None: our kernel for few rows.
    """
    trial = context.get_or_create(("trial", *weight.shape, weight.dtype, dtype), lambda: _trial(context, weight, dtype))
    trials = Trials(context, trial.rows, count, random_like(weight), dtype)
    algorithms = [*islice(trials.equal(trial.wanted), None if count <= MEASURED else 1)]
    few = _few(context, *trials.operands)
    if few is not None and not trials.gives(few, trial.wanted):
        few = None
    if not algorithms and few is None:
        raise _unavailable(weight, f"{count} rows")
    if count > MEASURED:
        return algorithms[0]
    calls: list[Call] = [trials.call(each) for each in algorithms]
    times = trials.microseconds([*calls, few] if few is not None else calls)
    gained = _READ_AHEAD_FLOAT8 if weight.dtype == torch.float8_e4m3fn else _READ_AHEAD
    if few is not None and times[-1] <= min(times) + gained:
        return None
    return algorithms[times.index(min(times))]


def _trial(context: Context, weight: torch.Tensor, dtype: torch.dtype) -> _Trial:
    drawn = random_like(weight)
    rows = random_rows(_ROWS, weight.shape[1], 0, weight)
    trials = Trials(context, rows, _ROWS, drawn, dtype)
    seen: list[torch.Tensor] = []
    for algorithm in trials.algorithms():
        result = trials.result(trials.call(algorithm)).clone()
        if any(same_bits(result, other) for other in seen):
            continue
        seen.append(result)
        if all(any(Trials(context, rows, count, drawn, dtype).equal(result)) for count in _REQUIRED_COUNTS):
            return _Trial(rows, result)
    raise _unavailable(weight, f"any of {', '.join(map(str, _REQUIRED_COUNTS))} rows")


def _unavailable(weight: torch.Tensor, rows: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"device: {device_of(weight.device).name} has no matmul of {rows} by {list(weight.shape)} in "
        f"{weight.dtype} whose rows have equal bits among any number of rows; build the bundle without "
        "backend.batch_invariant"
    )
