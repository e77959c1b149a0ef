"""Float8 matmuls by the fastest cuBLASLt algorithm with the same bits as the library's first choice.

For tens of rows, the library's first choice is up to 10% slower than the best of its algorithms. Float8 sums hardly
round, so nearly all algorithms give equal bits. Algorithms that differ in one of a million trial outputs are rejected,
so the choice by timing does not change results.
"""

from functools import partial

import torch

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.cublaslt import Algorithm, Matmul
from tandemrt.plugins.kernels.matmul_choices import Choices
from tandemrt.plugins.kernels.matmul_trials import Trials, random_like, random_rows, same_bits, workspace
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

MOST_ROWS = 128  # trials found nothing better for more rows
# outputs; in bfloat16 another order of sums changes the last bits of one output in about ten thousand
_MIN_COMPARED = 1 << 20
_MAX_TRIALS = 64


class FastestMatmul:
    """Bound matmul x [..., inner] @ weight.T, weight [width, inner], into out [..., width], without scales. Capturable.

    The first bind for a number of rows and a weight shape waits for the device.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        width, inner = weight.shape
        rows, results = x.view(-1, inner), out.view(-1, width)
        self._matmul = Matmul(rows, weight, results, workspace(context))
        key = f"fastest {len(rows)} {list(weight.shape)} {weight.dtype} {out.dtype}"
        choose = partial(_fastest, context, len(rows), weight, out.dtype)
        algorithm = context.get_or_create(
            key, lambda: Choices.of(context).get_or_try(key, self._matmul.supports, choose)
        )
        assert algorithm is not None
        self._algorithm = algorithm

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._matmul.run(self._algorithm)


def _fastest(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm:
    drawn = min(_MAX_TRIALS, -(-_MIN_COMPARED // (count * len(weight))))
    alike = random_like(weight)  # random, so that the choice does not depend on a checkpoint's values
    rows = (random_rows(count, weight.shape[1], seed, weight) for seed in range(drawn))
    trials = [Trials(context, each, count, alike, dtype) for each in rows]
    algorithms = trials[0].algorithms()
    if not algorithms:
        raise BackendUnavailable(
            f"device: {device_of(weight.device).name} has no matmul of {count} rows by "
            f"{list(weight.shape)} in {weight.dtype}; build the bundle from weights that are not float8"
        )
    first, *others = algorithms
    wanted = [each.result(each.call(first)).clone() for each in trials]

    def same(algorithm: Algorithm) -> bool:
        return all(
            same_bits(each.result(each.call(algorithm)), bits) for each, bits in zip(trials, wanted, strict=True)
        )

    equal = [first, *filter(same, others)]
    times = trials[0].microseconds([trials[0].call(each) for each in equal])
    return equal[times.index(min(times))]
