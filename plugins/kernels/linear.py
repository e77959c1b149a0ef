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
from tandemrt.plugins.kernels.cublaslt import WORKSPACE, Algorithm, Product
from tandemrt.plugins.launch import Context, Tensors

_ROWS = 64  # of a trial, over and over
_LADDER = (1, 8, 256)  # numbers of rows for which there must be algorithms of equal bits; any other is tried when bound
_TRIED = 6  # algorithms for a number of rows
_ALIKE = (40, 80, 320)  # numbers of rows whose algorithms serve fewer rows, too, and may be faster for them
_MEASURED = 320  # rows up to which products are bound by reading weights, and the first algorithm may be half as fast
_RUNS = 3  # of a measurement
_COLD = 128 << 20  # bytes, more than a second-level cache holds
_LARGEST = 448.0  # of float8_e4m3fn


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
        self._product = Product(rows, weight, results, _workspace(context))
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


class _Trials:
    """The product of a trial's rows, over and over until they are ``count``, by any algorithm."""

    def __init__(self, context: Context, rows: torch.Tensor, count: int, weight: torch.Tensor, dtype: torch.dtype):
        self._context, self._count = context, count
        self._made = torch.empty(count, len(weight), dtype=dtype, device=weight.device)
        self._product = Product(_repeated(rows, count), weight, self._made, _workspace(context))

    def algorithms(self) -> list[Algorithm]:
        counts = (self._count, *(_ALIKE if self._count <= _MEASURED else ()))
        found = [algorithm for count in counts for algorithm in self._product.algorithms(count, _TRIED)]
        return list({bytes(algorithm): algorithm for algorithm in found}.values())

    def result(self, algorithm: Algorithm) -> torch.Tensor:
        """[count, width], in memory that the next result takes."""
        self._product.run(algorithm)
        return self._made

    def equal(self, wanted: torch.Tensor) -> list[Algorithm]:
        """Those that make ``wanted`` of each of the trial's rows."""
        expected = _repeated(wanted, self._count)
        return [each for each in self.algorithms() if _same_bits(self.result(each), expected)]

    def microseconds(self, algorithm: Algorithm) -> float:
        """The least of some runs, each of which finds the weight outside of the caches."""
        device = self._made.device
        caches = self._context.keep("cold", lambda: torch.empty(_COLD, dtype=torch.uint8, device=device))
        times: list[float] = []
        for _ in range(_RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            caches.zero_()
            begin.record()
            self._product.run(algorithm)
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        return min(times)


def _algorithm(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm:
    """The fastest for ``count`` rows of those that give what others give for other numbers of rows."""
    trial = context.keep(("trial", *weight.shape, weight.dtype, dtype), lambda: _trial(context, weight, dtype))
    trials = _Trials(context, trial.rows, count, random_like(weight), dtype)
    found = trials.equal(trial.wanted)
    if not found:
        raise _unavailable(weight, f"{count} rows")
    return min(found, key=trials.microseconds) if count <= _MEASURED else found[0]


def _trial(context: Context, weight: torch.Tensor, dtype: torch.dtype) -> _Trial:
    drawn = random_like(weight)
    rows = _random(_ROWS, weight.shape[1], 0, weight)
    trials = _Trials(context, rows, _ROWS, drawn, dtype)
    seen: list[torch.Tensor] = []
    for algorithm in trials.algorithms():
        found = trials.result(algorithm).clone()
        if any(_same_bits(found, other) for other in seen):
            continue
        seen.append(found)
        if all(_Trials(context, rows, count, drawn, dtype).equal(found) for count in _LADDER):
            return _Trial(rows, found)
    raise _unavailable(weight, f"any of {', '.join(map(str, _LADDER))} rows")


def random_like(like: torch.Tensor) -> torch.Tensor:
    """Random numbers of the shape and dtype of a weight, the same ones every time: they are not worth the memory."""
    width, inner = like.shape
    return _random(width, inner, 1, like)


def _random(count: int, inner: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """[count, inner] in the dtype of ``like``, on its device. What is in a checkpoint, NaN even, decides nothing."""
    float8 = like.dtype == torch.float8_e4m3fn
    generator = torch.Generator(like.device).manual_seed(seed)
    dtype = torch.bfloat16 if float8 else like.dtype
    drawn = torch.randn(count, inner, generator=generator, device=like.device, dtype=dtype)
    if float8:
        drawn *= _LARGEST / drawn.abs().amax(-1, keepdim=True)  # as tokens are rounded
    return drawn.to(like.dtype)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    as_bytes = rows.view(torch.uint8)  # float8 is not indexed
    return as_bytes[torch.arange(count, device=rows.device) % len(rows)].view(rows.dtype)


def _workspace(context: Context) -> torch.Tensor:
    return context.keep("cublaslt", lambda: torch.empty(WORKSPACE, dtype=torch.uint8, device=context.device))


def _unavailable(weight: torch.Tensor, rows: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"device: {torch.cuda.get_device_name(weight.device)} has no product of {rows} by {list(weight.shape)} in "
        f"{weight.dtype} whose rows have equal bits among any number of rows; build the bundle without "
        "backend.batch_invariant"
    )
