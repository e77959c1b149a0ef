"""Check logits of decoder engines: against the same graph on the CPU, and with poisoned caches."""

from dataclasses import dataclass, field

import torch

from tandemrt.engines.recipe.backends import CPU
from tandemrt.runtime.caches.kv_cache import is_paged
from tandemrt.runtime.check.decoder_run import DecodePlan, score_as_served
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine

# Largest difference of a logit as a share of the largest logit, from other summation orders and rounding in layers.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# The same if matmuls quantize their inputs: a difference in the last bit can move a value by one 8-bit step.
QUANTIZED_TOLERANCE = 5e-2
GARBAGE = 3e2  # much larger than real cache values, and finite in every dtype


def check_logits(name: str, engine: Engine, expected: torch.Tensor, plan: DecodePlan, tolerance: float) -> CheckResult:
    """Compare the logits of every token that ``plan`` scores with ``expected`` [rows, length, vocab]."""
    dtype = engine.contract["logits"].dtype
    difference = LogitsDifference()
    for kind, row, position, logits in score_as_served(engine, plan):
        difference.add(kind, logits, expected[row, position])
    return CheckResult(
        f"logits of {name}",
        f"{CPU}, float32, all tokens in one call",
        difference.describe(tolerance),
        passed_if(difference.within(tolerance)),
        {"tolerance": tolerance, "dtype": dtype, **difference.numbers()},
    )


def measure_float8_cache(name: str, quantized: torch.Tensor, unquantized: torch.Tensor) -> CheckResult:
    """Measure the error of a float8 cache from logits [rows, length, vocab] with it and with a float32 cache.

    Both come from the float32 graph, so other rounding of the served engine does not count.
    """
    difference, size = LogitsDifference(), 0.0
    for logits, expected in zip(quantized.flatten(0, 1), unquantized.flatten(0, 1), strict=True):
        difference.add("token", logits, expected)
        size += float(expected[~expected.isneginf()].square().mean())
    relative = (difference.squares / size) ** 0.5
    return CheckResult(
        f"keys and values of {name} in float8",
        f"both on {CPU} in float32: the same over a cache in float32",
        f"logits {relative:.2%} apart (root mean square); largest logit the same in {difference.same} of "
        f"{difference.total}",
        "measured",
        {"root_mean_square_relative": relative, **difference.numbers()},
    )


def check_poisoned_cache(name: str, engine: Engine, plan: DecodePlan) -> CheckResult:
    """Repeat the calls with caches full of NaN, then of finite garbage. Unwritten entries must not change logits."""
    tolerance = TOLERANCES[engine.contract["logits"].dtype]
    clean = [logits for *_, logits in score_as_served(engine, plan)]
    differences = {}
    for word, poison in (("NaN", float("nan")), ("finite garbage", GARBAGE)):
        differences[word] = LogitsDifference()
        for (kind, *_, logits), expected in zip(score_as_served(engine, plan, poison), clean, strict=True):
            differences[word].add(kind, logits, expected)
    # Library operators read a linear cache and multiply masked entries by 0. It never contains NaN in serving.
    paged = is_paged(engine.contract)
    passed = differences["finite garbage"].within(tolerance) and (differences["NaN"].within(tolerance) or not paged)
    words = [f"{word}: {_in_words(difference, tolerance)}" for word, difference in differences.items()]
    return CheckResult(
        f"poisoned cache of {name}",
        "the same engine on a clean cache",
        "; ".join(words) + ("" if paged else " (a linear cache never holds NaN)"),
        passed_if(passed),
        {"tolerance": tolerance, "scored": len(clean), "largest_absolute": differences["finite garbage"].largest},
    )


@dataclass
class LogitsDifference:
    """Statistics of the differences between logits and expected logits.

    Attributes:
        scored: number of tokens by kind of call.
        largest: largest absolute difference.
        squares: sum over tokens of the mean squared difference.
        reach: largest absolute expected logit; differences are relative to it.
        same: number of tokens with the same largest logit.
        finite: whether all logits were finite, and -inf at the same places.
    """

    scored: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    squares: float = 0.0
    reach: float = 0.0
    same: int = 0
    finite: bool = True

    def add(self, kind: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Add one token's logits [vocab]."""
        self.scored[kind] = self.scored.get(kind, 0) + 1
        known = ~expected.isneginf()  # tokens outside of a draft head's vocabulary are -inf
        self.finite &= torch.equal(known, ~logits.isneginf())
        self.finite &= bool(logits[known].isfinite().all()) and bool(expected[known].isfinite().all())
        gap = (logits[known] - expected[known]).abs()
        self.largest = max(self.largest, float(gap.max()))
        self.squares += float(gap.square().mean())
        self.reach = max(self.reach, float(expected[known].abs().max()))
        self.same += int(logits.argmax() == expected.argmax())

    @property
    def total(self) -> int:
        return sum(self.scored.values())

    def within(self, tolerance: float) -> bool:
        return self.finite and self.largest <= tolerance * self.reach

    def describe(self, tolerance: float) -> str:
        if not self.finite:
            return "logits that are not finite; the weights or the engine are damaged"
        return (
            f"{self.total} tokens: at most {self.largest:.2g} of {self.reach:.3g} apart, allowed {tolerance:g} of it; "
            f"largest logit the same in {self.same}"
        )

    def numbers(self) -> dict[str, float | int]:
        return {
            "largest_absolute": self.largest,
            "largest_relative": self.largest / self.reach if self.reach else 0.0,
            "root_mean_square": (self.squares / max(1, self.total)) ** 0.5,
            "largest_logit": self.reach,
            "same_largest": self.same,
            **{f"scored_{kind}": count for kind, count in self.scored.items()},
        }


def _in_words(difference: LogitsDifference, tolerance: float) -> str:
    if difference.finite and difference.largest == 0:
        return "same bits"
    return "same within the tolerance" if difference.within(tolerance) else "other logits"
