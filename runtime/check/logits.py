"""Logits of the decoder engines against the same graphs on the CPU, and against themselves on poisoned caches."""

from dataclasses import dataclass, field

import torch

from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.caches.kv_cache import is_paged
from tandemrt.runtime.check.finding import Finding, judged
from tandemrt.runtime.check.walk import Plan, found

# Largest difference of a logit, as a share of the largest logit: sums in another order, and rounding between layers.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# The same where products round what they multiply: a last bit can move a value by a step of 8 bits.
ROUNDED = 5e-2
GARBAGE = 3e2  # far from anything a model writes, and no overflow in any dtype


def check_logits(name: str, engine: Engine, expected: torch.Tensor, plan: Plan, tolerance: float) -> Finding:
    """Compare every token the plan has scored with ``expected`` [rows, length, vocab]."""
    dtype = engine.contract["logits"].dtype
    difference = Difference()
    for kind, row, place, logits in found(engine, plan):
        difference.add(kind, logits, expected[row, place])
    return Finding(
        f"logits of {name}",
        "onnxruntime-cpu, float32, all tokens in one call",
        difference.describe(tolerance),
        judged(difference.within(tolerance)),
        {"tolerance": tolerance, "dtype": dtype, **difference.numbers()},
    )


def measure_cache(name: str, rounded: torch.Tensor, whole: torch.Tensor) -> Finding:
    """What a cache in float8 costs: logits [rows, length, vocab] over one, against those over one in float32.

    Both are of the graph in float32, so that what the served engine rounds beside is not counted.
    """
    difference, size = Difference(), 0.0
    for logits, expected in zip(rounded.flatten(0, 1), whole.flatten(0, 1), strict=True):
        difference.add("token", logits, expected)
        size += float(expected[~expected.isneginf()].square().mean())
    apart = (difference.squares / size) ** 0.5
    return Finding(
        f"keys and values of {name} in float8",
        "both on onnxruntime-cpu in float32: the same over a cache in float32",
        f"logits {apart:.2%} apart (root mean square); largest logit the same in {difference.same} of "
        f"{difference.total}",
        "measured",
        {"root_mean_square_relative": apart, **difference.numbers()},
    )


def check_poison(name: str, engine: Engine, plan: Plan) -> Finding:
    """The same calls with caches that hold NaN, then finite garbage, wherever nothing was written."""
    tolerance = TOLERANCES[engine.contract["logits"].dtype]
    clean = [logits for *_, logits in found(engine, plan)]
    seen = {}
    for word, poison in (("NaN", float("nan")), ("finite garbage", GARBAGE)):
        seen[word] = Difference()
        for (kind, *_, logits), expected in zip(found(engine, plan, poison), clean, strict=True):
            seen[word].add(kind, logits, expected)
    # A linear cache is read by library operators, which multiply what is masked by 0; it only ever holds numbers.
    paged = is_paged(engine.contract)
    holds = seen["finite garbage"].within(tolerance) and (seen["NaN"].within(tolerance) or not paged)
    told = [f"{word}: {_told(difference, tolerance)}" for word, difference in seen.items()]
    return Finding(
        f"poisoned cache of {name}",
        "the same engine on a clean cache",
        "; ".join(told) + ("" if paged else " (a linear cache never holds NaN)"),
        judged(holds),
        {"tolerance": tolerance, "scored": len(clean), "largest_absolute": seen["finite garbage"].largest},
    )


@dataclass
class Difference:
    """Sums up how logits depart from what was expected."""

    scored: dict[str, int] = field(default_factory=dict)  # tokens, by kind of call
    largest: float = 0.0
    squares: float = 0.0
    reach: float = 0.0  # the largest expected logit
    same: int = 0  # tokens whose largest logit is the same one
    finite: bool = True

    def add(self, kind: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
        self.scored[kind] = self.scored.get(kind, 0) + 1
        known = ~expected.isneginf()  # a head that drafts knows some of the target's tokens only
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


def _told(difference: Difference, tolerance: float) -> str:
    if difference.finite and difference.largest == 0:
        return "same bits"
    return "same within the tolerance" if difference.within(tolerance) else "other logits"
