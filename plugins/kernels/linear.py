"""Products on the GPU in which a row's result is the same bits among any number of rows.

cuBLASLt picks an algorithm by the number of rows, and may let several blocks sum up an output's inputs, each a part of
them. Of those that leave the sum to one block nearly all give equal bits, whatever their tiles. Nothing documents
which, so they are tried on random rows and weights; among those of equal bits the fastest is taken, which changes no
result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.plugins.kernels.cublaslt import Algorithm, Product
from tandemrt.plugins.kernels.product_trials import MEASURED, Trials, random_like, random_rows, same_bits, workspace
from tandemrt.plugins.launch import Context, Tensors

_ROWS = 64  # of a trial, over and over
_LADDER = (1, 8, 256)  # numbers of rows for which there must be algorithms of equal bits; any other is tried when bound


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "BatchInvariantProduct":  # noqa: ARG001
    """See plugins/launch.py."""
    return BatchInvariantProduct(context, tensors["x"], tensors["weight"], tensors["product"])


class BatchInvariantProduct:
    """x [..., inner] @ weight.T, weight [width, inner], into product [..., width], bound. Capturable.

    Binding waits for the device where it is the first of so many rows. Raises BackendUnavailable if there are no
    algorithms of equal bits.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, product: torch.Tensor) -> None:
        width, inner = weight.shape
        if x.shape[-1] != inner or product.shape != (*x.shape[:-1], width) or x.dtype != weight.dtype:
            raise ValueError(
                f"x: {weight.dtype}[..., {inner}] is needed for weight {tuple(weight.shape)} and product "
                f"{tuple(product.shape)}, got {x.dtype}{list(x.shape)}"
            )
        rows, results = x.view(-1, inner), product.view(-1, width)
        self._product = Product(rows, weight, results, workspace(context))
        key = (len(rows), *weight.shape, weight.dtype, product.dtype)
        self._algorithm = context.keep(("linear", *key), lambda: _algorithm(context, len(rows), weight, product.dtype))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._product.run(self._algorithm)


@dataclass(frozen=True)
class _Trial:
    """``rows`` [_ROWS, inner] of random numbers, and what their products by random weights must be, [_ROWS, width].

    Weights of one shape and dtype share a trial.
    """

    rows: torch.Tensor
    wanted: torch.Tensor


def _algorithm(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm:
    """The fastest for ``count`` rows of those that give what others give for other numbers of rows."""
    trial = context.keep(("trial", *weight.shape, weight.dtype, dtype), lambda: _trial(context, weight, dtype))
    trials = Trials(context, trial.rows, count, random_like(weight), dtype)
    found = trials.equal(trial.wanted)
    if not found:
        raise _unavailable(weight, f"{count} rows")
    return min(found, key=trials.microseconds) if count <= MEASURED else found[0]


def _trial(context: Context, weight: torch.Tensor, dtype: torch.dtype) -> _Trial:
    drawn = random_like(weight)
    rows = random_rows(_ROWS, weight.shape[1], 0, weight)
    trials = Trials(context, rows, _ROWS, drawn, dtype)
    seen: list[torch.Tensor] = []
    for algorithm in trials.algorithms():
        found = trials.result(algorithm).clone()
        if any(same_bits(found, other) for other in seen):
            continue
        seen.append(found)
        if all(Trials(context, rows, count, drawn, dtype).equal(found) for count in _LADDER):
            return _Trial(rows, found)
    raise _unavailable(weight, f"any of {', '.join(map(str, _LADDER))} rows")


def _unavailable(weight: torch.Tensor, rows: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"device: {torch.cuda.get_device_name(weight.device)} has no product of {rows} by {list(weight.shape)} in "
        f"{weight.dtype} whose rows have equal bits among any number of rows; build the bundle without "
        "backend.batch_invariant"
    )
