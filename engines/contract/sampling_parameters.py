"""Sampling parameters that the operators of verification and drafting take: one row per parameter.

From this table are made: inputs of the operators (engines/contract/operators.py), arguments of their definitions,
inputs of the ONNX functions, parameters of the CUDA kernels (plugins/kernels/sampling_header.py), the state of a slot,
and the cases of checks. docs/operators.md defines the filters.
"""

from dataclasses import dataclass
from typing import Literal

_FLOAT32_MAX, _INT64_MAX = (2 - 2**-23) * 2.0**127, 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParameter:
    """A vector with a value per request.

    Attributes:
        most: the largest value; the smallest is 0. None: any value.
    """

    dtype: Literal["float32", "int64"]
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Filter(SamplingParameter):
    """A parameter that removes tokens. Operators keep every token at 0.

    Attributes:
        off: the value that keeps every token in a request.
        cases: values that checks mix.
    """

    most: float
    off: float
    cases: tuple[float, ...]


# In the order in which they apply to the scores.
FILTERS = {
    "top_n_sigma": Filter(dtype="float32", most=100, off=0, cases=(0, 0, 0.7, 2)),
    "top_k": Filter(dtype="int64", most=_INT64_MAX, off=0, cases=(0, 1, 7, 10**6)),
    "top_p": Filter(dtype="float32", most=1, off=1, cases=(0, 0.4, 0.95, 1)),
    "min_p": Filter(dtype="float32", most=1, off=0, cases=(0, 0.02, 0.5)),
}
# The standard deviation of top_n_sigma sums distances from the largest logit, as multiples of 1 / SIGMA_UNITS of the
# row's range.
SIGMA_UNITS = 2.0**38

# In the order of the operators' inputs. `seed` has the bits of an unsigned 64-bit integer. `position` is the index, in
# prompt plus output, of the token that row 0 decides. `rule` is a Rule of plugins/operators/constants.py.
SAMPLING_PARAMETERS: dict[str, SamplingParameter] = {
    "temperature": SamplingParameter(dtype="float32", most=_FLOAT32_MAX),
    **FILTERS,
    "seed": SamplingParameter(dtype="int64"),
    "position": SamplingParameter(dtype="int64", most=_INT64_MAX),
    "rule": SamplingParameter(dtype="int64"),
}
