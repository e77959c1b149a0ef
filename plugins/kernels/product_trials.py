"""Trials of cuBLASLt's algorithms for products of some rows: which give what bits, and how long each takes."""

import torch

from tandemrt.plugins.kernels.cublaslt import WORKSPACE, Algorithm, Product
from tandemrt.plugins.launch import Context

MEASURED = 320  # rows up to which products are bound by reading weights, and the first algorithm may be half as fast
_TRIED = 6  # algorithms for a number of rows
_ALIKE = (40, 80, 320)  # numbers of rows whose algorithms serve fewer rows, too, and may be faster for them
_RUNS = 3  # of a measurement
_COLD = 128 << 20  # bytes, more than a second-level cache holds
_LARGEST = 448.0  # of float8_e4m3fn


class Trials:
    """The product of a trial's rows, over and over until they are ``count``, by any algorithm."""

    def __init__(self, context: Context, rows: torch.Tensor, count: int, weight: torch.Tensor, dtype: torch.dtype):
        self._count = count
        self._made = torch.empty(count, len(weight), dtype=dtype, device=weight.device)
        self._product = Product(repeated(rows, count), weight, self._made, workspace(context))

    def algorithms(self) -> list[Algorithm]:
        counts = (self._count, *(_ALIKE if self._count <= MEASURED else ()))
        found = [algorithm for count in counts for algorithm in self._product.algorithms(count, _TRIED)]
        return list({bytes(algorithm): algorithm for algorithm in found}.values())

    def result(self, algorithm: Algorithm) -> torch.Tensor:
        """[count, width], in memory that the next result takes."""
        self._product.run(algorithm)
        return self._made

    def equal(self, wanted: torch.Tensor) -> list[Algorithm]:
        """Those that make ``wanted`` of each of the trial's rows."""
        expected = repeated(wanted, self._count)
        return [each for each in self.algorithms() if same_bits(self.result(each), expected)]

    def microseconds(self, algorithm: Algorithm) -> float:
        """The least of some runs, each of which finds the weight outside of the caches."""
        caches = torch.empty(_COLD, dtype=torch.uint8, device=self._made.device)
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


def random_like(like: torch.Tensor) -> torch.Tensor:
    """Random numbers of the shape and dtype of a weight, the same ones every time: they are not worth the memory."""
    width, inner = like.shape
    return random_rows(width, inner, 1, like)


def random_rows(count: int, inner: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """[count, inner] in the dtype of ``like``, on its device. What is in a checkpoint, NaN even, decides nothing."""
    float8 = like.dtype == torch.float8_e4m3fn
    generator = torch.Generator(like.device).manual_seed(seed)
    dtype = torch.bfloat16 if float8 else like.dtype
    drawn = torch.randn(count, inner, generator=generator, device=like.device, dtype=dtype)
    if float8:
        drawn *= _LARGEST / drawn.abs().amax(-1, keepdim=True)  # as tokens are rounded
    return drawn.to(like.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    as_bytes = rows.view(torch.uint8)  # float8 is not indexed
    return as_bytes[torch.arange(count, device=rows.device) % len(rows)].view(rows.dtype)


def workspace(context: Context) -> torch.Tensor:
    return context.keep("cublaslt", lambda: torch.empty(WORKSPACE, dtype=torch.uint8, device=context.device))
