"""Result of one check: a row of the table and an object of the JSON report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "fail", "measured", "not applicable"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: name of the check.
        against: the reference of the comparison; "" without one.
        result: measured values; for a failure also the reason.
        numbers: the same values for the JSON report.
    """

    check: str
    against: str
    result: str
    verdict: Verdict
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; "nan" and "inf" as strings."""
        return {
            "check": self.check,
            "against": self.against,
            "result": self.result,
            "verdict": self.verdict,
            "numbers": {name: _as_json(value) for name, value in self.numbers.items()},
        }


def passed_if(condition: bool) -> Verdict:
    return "pass" if condition else "fail"


def _as_json(value: float | int | str) -> float | int | str:
    return value if isinstance(value, str) or math.isfinite(value) else str(value)
