"""Trial runs of cuBLASLt algorithms: compare their bits and measure their times."""

import torch

from tandemrt.plugins.kernels.cublaslt import WORKSPACE, Algorithm, Matmul
from tandemrt.plugins.operators.launch import Context

MEASURED = 320  # up to this many rows a matmul is memory-bound, and the first algorithm may take twice as long
_MAX_ALGORITHMS = 6  # algorithms per number of rows
_SIMILAR_COUNTS = (40, 80, 320)  # algorithms for these numbers of rows also support fewer rows, and may be faster there
_RUNS = 3  # runs of a measurement
_FLUSH_BYTES = 128 << 20  # more than an L2 cache holds
_FLOAT8_MAX = 448.0  # largest value of float8_e4m3fn


class Trials:
    """The matmul of a trial's rows, repeated up to ``count`` rows, by any algorithm."""

    def __init__(self, context: Context, rows: torch.Tensor, count: int, weight: torch.Tensor, dtype: torch.dtype):
        self._count = count
        self._made = torch.empty(count, len(weight), dtype=dtype, device=weight.device)
        self._matmul = Matmul(repeated(rows, count), weight, self._made, workspace(context))

    def algorithms(self) -> list[Algorithm]:
        counts = (self._count, *(_SIMILAR_COUNTS if self._count <= MEASURED else ()))
        found = [algorithm for count in counts for algorithm in self._matmul.algorithms(count, _MAX_ALGORITHMS)]
        return list({bytes(algorithm): algorithm for algorithm in found}.values())

    def result(self, algorithm: Algorithm) -> torch.Tensor:
        """Run and return the result [count, width], in memory that the next result reuses."""
        self._matmul.run(algorithm)
        return self._made

    def equal(self, wanted: torch.Tensor) -> list[Algorithm]:
        """Return the algorithms that give ``wanted`` for each of the trial's rows."""
        expected = repeated(wanted, self._count)
        return [each for each in self.algorithms() if same_bits(self.result(each), expected)]

    def microseconds(self, algorithm: Algorithm) -> float:
        """Return the minimum time of a few runs, each with a cold L2 cache."""
        caches = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self._made.device)
        times: list[float] = []
        for _ in range(_RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            caches.zero_()
            begin.record()
            self._matmul.run(algorithm)
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        return min(times)


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
