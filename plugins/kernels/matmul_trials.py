"""Trial runs of cuBLASLt algorithms: compare their bits and measure their times."""

import math
from collections.abc import Iterator, Sequence

import torch

from tandemrt.plugins.kernels.cublaslt import WORKSPACE, Algorithm, Matmul, MatmulCall
from tandemrt.plugins.operators.launch import Call, Context
from tandemrt.plugins.tensors.devices.lookup import device_of

MEASURED = 320  # up to this many rows a matmul is memory-bound, and the first algorithm may take twice as long
_MAX_ALGORITHMS = 6  # algorithms per number of rows
_SIMILAR_COUNTS = (40, 80, 320)  # algorithms for these numbers of rows also support fewer rows, and may be faster there
_RUNS = 5  # runs of a measurement
_WARM_RUNS = 1000  # about 50 ms
_FLUSH_BYTES = 128 << 20  # more than an L2 cache holds
_FLOAT8_MAX = 448.0  # largest value of float8_e4m3fn


class Trials:
    """The matmul of a trial's rows, repeated up to ``count`` rows, by any algorithm."""

    def __init__(self, context: Context, rows: torch.Tensor, count: int, weight: torch.Tensor, dtype: torch.dtype):
        self._context, self._count = context, count
        self._made = torch.empty(count, len(weight), dtype=dtype, device=weight.device)
        self.operands = repeated(rows, count), weight, self._made
        self._matmul = Matmul(*self.operands, workspace(context))

    def algorithms(self) -> list[Algorithm]:
        counts = (self._count, *(_SIMILAR_COUNTS if self._count <= MEASURED else ()))
        algorithms = [algorithm for count in counts for algorithm in self._matmul.algorithms(count, _MAX_ALGORITHMS)]
        return list({bytes(algorithm): algorithm for algorithm in algorithms}.values())

    def call(self, algorithm: Algorithm) -> MatmulCall:
        return MatmulCall(self._matmul, algorithm)

    def result(self, call: Call) -> torch.Tensor:
        """Run and return the result [count, width], in memory that the next result reuses."""
        call.run()
        return self._made

    def gives(self, call: Call, wanted: torch.Tensor) -> bool:
        """Return whether ``call`` gives ``wanted`` for each of the trial's rows."""
        return same_bits(self.result(call), repeated(wanted, self._count))

    def equal(self, wanted: torch.Tensor) -> Iterator[Algorithm]:
        """Yield the algorithms that give ``wanted`` for each of the trial's rows."""
        expected = repeated(wanted, self._count)
        return (each for each in self.algorithms() if same_bits(self.result(self.call(each)), expected))

    def microseconds(self, calls: Sequence[Call]) -> list[float]:
        """Return the minimum time of a few runs of each call, in turns, each run with a cold L2 cache."""
        caches = self._context.get_or_create("matmul trials", self._warm)
        gpu, times = device_of(self._made.device), [math.inf] * len(calls)
        for _ in range(_RUNS):
            for index, call in enumerate(calls):
                caches.sum()  # reads: memory that was written would be evicted during the measured call
                begin = gpu.timestamp()
                call.run()
                end = gpu.timestamp()
                gpu.synchronize()
                times[index] = min(times[index], 1e6 * gpu.seconds_between(begin, end))
        return times

    def _warm(self) -> torch.Tensor:
        """Return memory that evicts weights from the L2 cache, after the GPU has raised its clocks."""
        caches = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=self._made.device)
        for _ in range(_WARM_RUNS):
            caches.sum()
        return caches


def random_like(like: torch.Tensor) -> torch.Tensor:
    """Return random values of a weight's shape and dtype, the same ones in every call."""
    width, inner = like.shape
    return random_rows(width, inner, 1, like)


def random_rows(count: int, inner: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return random [count, inner] of ``like``'s dtype and device; a checkpoint's values, NaN too, have no effect."""
    float8 = like.dtype == torch.float8_e4m3fn
    generator = torch.Generator(like.device).manual_seed(seed)
    dtype = torch.bfloat16 if float8 else like.dtype
    drawn = torch.randn(count, inner, generator=generator, device=like.device, dtype=dtype)
    if float8:
        drawn *= _FLOAT8_MAX / drawn.abs().amax(-1, keepdim=True)  # as token quantization scales them
    return drawn.to(like.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    as_bytes = rows.view(torch.uint8)  # torch does not index float8
    return as_bytes[torch.arange(count, device=rows.device) % len(rows)].view(rows.dtype)


def workspace(context: Context) -> torch.Tensor:
    return context.get_or_create("cublaslt", lambda: torch.empty(WORKSPACE, dtype=torch.uint8, device=context.device))
