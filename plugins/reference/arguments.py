"""Per-request sampling parameters of verification and drafting, validated and broadcast to vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import Rule
from tandemrt.plugins.reference.noise import unsigned

RuleLike = Rule | str | int | Sequence[Rule | str | int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a batch, one vector per parameter. 0 disables a filter; a seed is any 64 bits."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    rule: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, batch: int, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any, rule: Any
    ) -> "Sampling":
        """Broadcast scalars over the batch and read None as 0. Raises ValueError for values out of range."""
        sampling = cls(
            temperature=_vector("temperature", temperature, batch, np.float32),
            top_k=_vector("top_k", top_k, batch, np.int64),
            top_p=_vector("top_p", top_p, batch, np.float32),
            min_p=_vector("min_p", min_p, batch, np.float32),
            seed=_vector("seed", unsigned(seed), batch, np.uint64),
            position=_vector("position", position, batch, np.int64),
            rule=_vector("rule", _rules(rule), batch, np.int64),
        )
        _check("temperature", sampling.temperature, 0, float(np.finfo(np.float32).max))
        _check("top_k", sampling.top_k, 0, np.iinfo(np.int64).max)
        _check("top_p", sampling.top_p, 0, 1)
        _check("min_p", sampling.min_p, 0, 1)
        _check("position", sampling.position, 0, np.iinfo(np.int64).max)
        return sampling


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


def _check(name: str, values: np.ndarray, low: float, high: float) -> None:
    wrong = values[~((values >= low) & (values <= high))]
    if wrong.size:
        raise ValueError(f"{name}: a value between {low} and {high} is needed, got {wrong[0]}")
