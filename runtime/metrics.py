"""What the runtime counts about itself, in one place."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace


@dataclass
class Metrics:
    """Counters of a loop since it started. Times are host seconds."""

    rounds: int = 0
    waits: int = 0  # times the host waited for the device: one per round
    drafted: int = 0  # proposed tokens of live requests
    evaluated: int = 0  # of those, verified: the rest was cut by a constraint or a limit
    emitted: int = 0  # tokens that verification decided for live requests
    kept: int = 0  # of those, in a text
    prefilled: int = 0
    forced_ends: int = 0  # reasoning closed by a budget
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "propose", "target", "wait", "commit", "fill", "verify"), 0.0)
    )

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Add the host time of the block to ``seconds[verb]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[verb] += time.perf_counter() - start

    def since(self, earlier: "Metrics") -> "Metrics":
        """What was counted after ``earlier``, a copy of these metrics."""

        def less(now: object, then: object) -> object:
            if isinstance(now, dict) and isinstance(then, dict):
                return {key: now[key] - then.get(key, 0) for key in now}
            return now - then  # type: ignore[operator]

        values = {f.name: less(getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)}
        return Metrics(**values)  # type: ignore[arg-type]

    def copy(self) -> "Metrics":
        return replace(self, finished=dict(self.finished), seconds=dict(self.seconds))
