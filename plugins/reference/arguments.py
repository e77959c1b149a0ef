"""Per-request sampling parameters of verification and drafting, validated and broadcast to vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.sampling_parameters import FILTERS, SAMPLING_PARAMETERS
from tandemrt.plugins.operators.constants import Rule
from tandemrt.plugins.reference.noise import unsigned

RuleLike = Rule | str | int | Sequence[Rule | str | int] | npt.NDArray[np.integer]
Sampling = Mapping[str, npt.NDArray[Any]]
"""Sampling parameters of a batch: a vector for each row of engines/contract/sampling_parameters.py, by its name."""


def sampling_vectors(batch: int, **values: Any) -> Sampling:
    """Broadcast each parameter over the batch and read None as 0.

    A filter may be omitted: it is then 0, which keeps every token. A seed is any 64 bits, and ``rule`` a RuleLike.
    Raises ValueError for values out of range, and TypeError for unknown and missing names.
    """
    required = SAMPLING_PARAMETERS.keys() - FILTERS.keys()
    if wrong := (required - values.keys()) | (values.keys() - SAMPLING_PARAMETERS.keys()):
        raise TypeError(f"sampling parameters: {', '.join(sorted(wrong))} must not be missing or unknown")
    vectors = {}
    for name, parameter in SAMPLING_PARAMETERS.items():
        if name == "seed":
            vectors[name] = _vector(name, unsigned(values[name]), batch, np.uint64)
        else:
            value = _rules(values[name]) if name == "rule" else values.get(name)
            vectors[name] = _vector(name, value, batch, parameter.dtype)
        if parameter.most is not None:
            _check(name, vectors[name], parameter.most)
    return vectors


def _vector(name: str, value: Any, batch: int, dtype: Any) -> np.ndarray:
    if isinstance(value, list | tuple):
        value = [0 if item is None else item for item in value]
    array = np.asarray(0 if value is None else value, dtype=dtype)
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name}: one value, or one per request ({batch}), is needed, got shape {array.shape}")
    return np.broadcast_to(array, (batch,))


def _rules(rule: RuleLike) -> int | list[int]:
    return [_rule(item) for item in rule] if np.iterable(rule) and not isinstance(rule, str) else _rule(rule)


def _rule(rule: Any) -> int:
    if isinstance(rule, str):
        if rule.upper() not in Rule.__members__:
            known = ", ".join(member.name.lower() for member in Rule)
            raise ValueError(f"rule: one of {known} is needed, got {rule!r}")
        return int(Rule[rule.upper()])
    return int(Rule(rule))


def _check(name: str, values: np.ndarray, most: float) -> None:
    wrong = values[~((values >= 0) & (values <= most))]
    if wrong.size:
        raise ValueError(f"{name}: a value between 0 and {most} is needed, got {wrong[0]}")
