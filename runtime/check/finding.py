"""What a check found: one row of the table, one object of the JSON report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "fail", "measured", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """``check`` names what was compared with ``against``; ``result`` says what was seen, and why if it failed."""

    check: str
    against: str
    result: str
    verdict: Verdict
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: a number that is none ("nan", "inf") is written as text."""
        return {
            "check": self.check,
            "against": self.against,
            "result": self.result,
            "verdict": self.verdict,
            "numbers": {name: _as_json(value) for name, value in self.numbers.items()},
        }


def judged(holds: bool) -> Verdict:
    return "pass" if holds else "fail"


def _as_json(value: float | int | str) -> float | int | str:
    return value if isinstance(value, str) or math.isfinite(value) else str(value)
