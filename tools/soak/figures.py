"""What a soak came to, as a table and as JSON; whether memory and threads stayed what they were."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tools.memory import resident_mb

GROWTH_MB = 48.0  # that the allocators of a long run may spread over


@dataclass
class Soaked:
    """What a run came to. ``memory_mb`` and ``threads`` were taken after every wave, with nothing running."""

    seed: int
    faults: list[str]
    drivers: list[str] = field(default_factory=list)  # kinds of bundle, and how they were run
    requests: int = 0  # sent, those included that were refused
    served: int = 0  # over Triton
    refused: int = 0
    left: int = 0  # streams that their client left: nobody heard how they ended
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    strikes: int = 0
    findings: list[str] = field(default_factory=list)
    stuck: bool = False  # somebody waited in vain, and the run was given up
    memory_mb: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    @property
    def growth_mb(self) -> float:
        """How far memory rises over the last two thirds of the run, by the slope of a line through it."""
        part = self.memory_mb[len(self.memory_mb) // 3 :]
        if len(part) < 2:
            return 0.0
        mean, middle = sum(part) / len(part), (len(part) - 1) / 2
        slope = sum((at - middle) * (mb - mean) for at, mb in enumerate(part))
        slope /= sum((at - middle) ** 2 for at in range(len(part)))
        return slope * (len(part) - 1)

    def measure(self) -> None:
        """Note memory and threads as they are now."""
        self.memory_mb.append(resident_mb())
        self.threads.append(threading.active_count())

    def sums(self) -> list[str]:
        """Say, one line each, what does not hold of the whole run: every request has one end, nothing has grown."""
        lines, settled = [], self.threads[2 * len(self.drivers) :]  # once every runtime has run
        if not self.stuck and self.requests != self.ended.total() + self.left + self.refused:
            lines.append(
                f"{self.requests} sent, {self.ended.total()} answered, {self.left} left, {self.refused} refused"
            )
        if settled and settled[-1] > settled[0]:
            lines.append(f"threads rose from {settled[0]} to {settled[-1]}")
        if self.growth_mb > max(GROWTH_MB, 0.05 * self.memory_mb[-1]):
            lines.append(f"memory rose by {self.growth_mb:.0f} MB, to {self.memory_mb[-1]:.0f} MB")
        return lines

    def write(self, file: Path) -> None:
        """Write all of it as JSON."""
        file.write_text(json.dumps({**vars(self), "growth_mb": self.growth_mb}, indent=2) + "\n")

    def table(self) -> Table:
        """The figures for a person."""
        table = Table("what", "figure", show_edge=False)
        ended = ", ".join(f"{reason} {count}" for reason, count in sorted(self.ended.items()))
        rows = {
            "over": "; ".join(self.drivers),
            "requests": f"{self.requests} in {self.seconds:.0f} s",
            "over Triton as well": str(self.served),
            "answered": f"{self.ended.total()} ({ended})",
            "refused; left by their client": f"{self.refused}; {self.left}",
            "engines that were made to fail": str(self.strikes),
            "memory at the end, growth": f"{self.memory_mb[-1]:.0f} MB, {self.growth_mb:+.0f} MB",
            "threads at the end": str(self.threads[-1]),
            "findings": str(len(self.findings)),
        }
        for what, figure in rows.items():
            table.add_row(what, figure)
        return table
