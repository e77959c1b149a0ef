"""Products on the GPU in which a row's result is the same bits among any number of rows.

cuBLASLt picks an algorithm by the number of rows, and may let several blocks sum up an output's inputs, each a part of
them. Of those that leave the sum to one block many give equal bits, whatever their tiles. Nothing documents which, so
they are tried on random rows, and the fastest is taken that gives the bits which algorithms have for every number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.plugins.kernels.cublaslt import WORKSPACE, Algorithm, Product
from tandemrt.plugins.launch import Context, Tensors

_TRIED = 32  # algorithms for a number of rows
_ROWS = 64  # of a trial, over and over
_LADDER = (1, 8, 256)  # numbers of rows for which there must be algorithms of equal bits; any other is tried when bound


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "BatchInvariantProduct":  # noqa: ARG001
    """See plugins/launch.py."""
    return BatchInvariantProduct(context, tensors["x"], tensors["weight"], tensors["product"])


class BatchInvariantProduct:
    """x [..., inner] @ weight.T, weight [width, inner], into product [..., width], bound. Capturable.

    Binding waits for the device where it is the first of so many rows.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, product: torch.Tensor) -> None:
        width, inner = weight.shape
        if x.shape[-1] != inner or product.shape != (*x.shape[:-1], width) or x.dtype != weight.dtype:
            raise ValueError(
                f"x: {weight.dtype}[..., {inner}] is needed for weight {tuple(weight.shape)} and product "
                f"{tuple(product.shape)}, got {x.dtype}{list(x.shape)}"
            )
        rows, results = x.view(-1, inner), product.view(-1, width)
        self._product = Product(rows, weight, results, _workspace(context))
        key = ("linear", len(rows), *weight.shape, weight.dtype, product.dtype)
        self._algorithm = context.keep(key, lambda: _algorithm(context, len(rows), weight, product.dtype))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._product.run(self._algorithm)


@dataclass(frozen=True)
class _Trial:
    """``rows`` [_ROWS, inner] of random numbers, and what a product of each must be, [_ROWS, width]."""

    rows: torch.Tensor
    wanted: torch.Tensor


def _algorithm(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm:
    """The fastest for ``count`` rows that gives what others give for other numbers. Raises BackendUnavailable."""
    trial = context.keep(("trial", *weight.shape, weight.dtype, dtype), lambda: _trial(context, weight, dtype))
    found = _first_equal(context, trial, count, weight)
    if found is None:
        raise _unavailable(weight, f"{count} rows")
    return found


def _trial(context: Context, weight: torch.Tensor, dtype: torch.dtype) -> _Trial:
    generator = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(_ROWS, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    seen: list[torch.Tensor] = []
    for _, found in _results(context, rows, _ROWS, weight, dtype):
        if any(torch.equal(found, other) for other in seen):
            continue
        seen.append(found.clone())
        trial = _Trial(rows, seen[-1])
        if all(_first_equal(context, trial, count, weight) is not None for count in _LADDER):
            return trial
    raise _unavailable(weight, f"any of {', '.join(map(str, _LADDER))} rows")


def _first_equal(context: Context, trial: _Trial, count: int, weight: torch.Tensor) -> Algorithm | None:
    wanted = _repeated(trial.wanted, count)
    for algorithm, found in _results(context, trial.rows, count, weight, wanted.dtype):
        if torch.equal(found, wanted):
            return algorithm
    return None


def _results(
    context: Context, rows: torch.Tensor, count: int, weight: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[Algorithm, torch.Tensor]]:
    """What each algorithm makes of ``rows`` over and over, ``count`` of them, in one memory for all."""
    made = torch.empty(count, len(weight), dtype=dtype, device=weight.device)
    product = Product(_repeated(rows, count), weight, made, _workspace(context))
    for algorithm in product.algorithms(_TRIED):
        product.run(algorithm)
        yield algorithm, made


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows[torch.arange(count, device=rows.device) % len(rows)]


def _workspace(context: Context) -> torch.Tensor:
    return context.keep("cublaslt", lambda: torch.empty(WORKSPACE, dtype=torch.uint8, device=context.device))


def _unavailable(weight: torch.Tensor, rows: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"device: {torch.cuda.get_device_name(weight.device)} has no product of {rows} by {list(weight.shape)} in "
        f"{weight.dtype} whose rows have equal bits among any number of rows; build the bundle without "
        "backend.batch_invariant"
    )
