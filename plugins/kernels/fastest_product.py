"""Products in float8 of some rows by the fastest of cuBLASLt's algorithms that give the bits of its own choice.

What the library expects to be fastest for some tens of rows is up to a tenth slower than another of its algorithms. Its
sums hardly round in float8, so nearly all algorithms give equal bits. One that gives others, of a million outputs, is
not taken: what is measured decides no result.
"""

import torch

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.plugins.kernels.cublaslt import Algorithm, Product
from tandemrt.plugins.kernels.product_trials import Trials, random_like, random_rows, same_bits, workspace
from tandemrt.plugins.launch import Context

MOST_ROWS = 128  # beyond, trials found nothing better
_COMPARED = 1 << 20  # outputs: sums in another order differ in the last bits of one of some ten thousand in bfloat16
_MOST_TRIALS = 64


class FastestProduct:
    """x [..., inner] @ weight.T, weight [width, inner], into product [..., width], without scales, bound. Capturable.

    Binding waits for the device where it is the first of so many rows and such a weight.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, product: torch.Tensor) -> None:
        width, inner = weight.shape
        rows, results = x.view(-1, inner), product.view(-1, width)
        self._product = Product(rows, weight, results, workspace(context))
        key = ("fastest", len(rows), *weight.shape, weight.dtype, product.dtype)
        self._algorithm = context.keep(key, lambda: _fastest(context, len(rows), weight, product.dtype))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._product.run(self._algorithm)


def _fastest(context: Context, count: int, weight: torch.Tensor, dtype: torch.dtype) -> Algorithm:
    drawn = min(_MOST_TRIALS, -(-_COMPARED // (count * len(weight))))
    alike = random_like(weight)  # what is in a checkpoint decides nothing
    rows = (random_rows(count, weight.shape[1], seed, weight) for seed in range(drawn))
    trials = [Trials(context, each, count, alike, dtype) for each in rows]
    found = trials[0].algorithms()
    if not found:
        raise BackendUnavailable(
            f"device: {torch.cuda.get_device_name(weight.device)} has no product of {count} rows by "
            f"{list(weight.shape)} in {weight.dtype}; build the bundle of weights that are not in float8"
        )
    first, *others = found
    wanted = [each.result(first).clone() for each in trials]

    def same(algorithm: Algorithm) -> bool:
        return all(same_bits(each.result(algorithm), bits) for each, bits in zip(trials, wanted, strict=True))

    return min((first, *filter(same, others)), key=trials[0].microseconds)
