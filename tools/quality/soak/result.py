"""The result of a soak, as a table and as JSON, with the growth of memory and threads."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tandemrt.runtime.llm.free_memory import trim_memory
from tools.bench.memory import resident_mb

GROWTH_MB = 48.0  # allowed growth: memory allocators of a long run spread


@dataclass
class SoakResult:
    """The figures of a run.

    Attributes:
        first: number of the first request; earlier runs of the seed have sent those before it.
        drivers: kinds of bundle, and how they were run.
        requests: all requests that this run sent, rejected ones included.
        triton_requests: requests that were also sent to a Triton server.
        abandoned: streams that their client closed. Their finish reason is unknown.
        preemptions: times that requests lost their slot because cache memory ran out.
        thread_refusals: threads that the runtime was refused.
        stuck: a request got no answer, and the run was abandoned.
        memory_mb, threads: measured before the first wave and after every wave, while nothing runs.
    """

    seed: int
    faults: list[str]
    first: int = 0
    drivers: list[str] = field(default_factory=list)
    requests: int = 0
    triton_requests: int = 0
    rejected: int = 0
    abandoned: int = 0
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    engine_failures: int = 0
    thread_refusals: int = 0
    preemptions: int = 0
    findings: list[str] = field(default_factory=list)
    stuck: bool = False
    memory_mb: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    @property
    def growth_mb(self) -> float:
        """Growth of memory over the last two thirds of the run, by linear regression, after all runtimes have begun."""
        part = self.memory_mb[max(len(self.memory_mb) // 3, self._starting) :]
        if len(part) < 2:
            return 0.0
        mean, middle = sum(part) / len(part), (len(part) - 1) / 2
        slope = sum((at - middle) * (mb - mean) for at, mb in enumerate(part))
        slope /= sum((at - middle) ** 2 for at in range(len(part)))
        return slope * (len(part) - 1)

    @property
    def _starting(self) -> int:
        """Number of waves in which runtimes still start threads and allocate their memory."""
        return 2 * len(self.drivers)

    def measure(self) -> None:
        """Record memory and threads now."""
        trim_memory()  # opening and closing bundles leaves free memory in the arenas of many threads
        self.memory_mb.append(resident_mb())
        self.threads.append(threading.active_count())

    def violations(self) -> list[str]:
        """Return one line for each violation over the whole run: every request ends once, and nothing grows."""
        lines, threads = [], self.threads[self._starting :]
        if not self.stuck and self.requests != self.ended.total() + self.abandoned + self.rejected:
            lines.append(
                f"{self.requests} sent, {self.ended.total()} answered, "
                f"{self.abandoned} abandoned, {self.rejected} rejected"
            )
        # Pools start their threads late, and end them with their runtime; a leak is in every later measurement.
        before = max(threads[: len(threads) // 2], default=0)
        after = min(threads[-(len(threads) // 4) :], default=0)
        if before and after > before + len(self.drivers):
            lines.append(f"threads rose from {before} to {after}")
        if self.growth_mb > max(GROWTH_MB, 0.05 * self.memory_mb[-1]):
            lines.append(f"memory rose by {self.growth_mb:.0f} MB, to {self.memory_mb[-1]:.0f} MB")
        return lines

    def write(self, file: Path) -> None:
        """Write all figures as JSON."""
        file.write_text(json.dumps({**vars(self), "growth_mb": self.growth_mb}, indent=2) + "\n")

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table("", "figure", show_edge=False)
        ended = ", ".join(f"{reason} {count}" for reason, count in sorted(self.ended.items()))
        rows = {
            "bundles": "; ".join(self.drivers),
            "requests": f"{self.requests} in {self.seconds:.0f} s",
            "sent to Triton as well": str(self.triton_requests),
            "answered": f"{self.ended.total()} ({ended})",
            "rejected; abandoned by their client": f"{self.rejected}; {self.abandoned}",
            "injected engine failures, refused threads": f"{self.engine_failures}, {self.thread_refusals}",
            "preempted": str(self.preemptions),
            "memory at the end, growth": f"{self.memory_mb[-1]:.0f} MB, {self.growth_mb:+.0f} MB",
            "threads at the end": str(self.threads[-1]),
            "findings": str(len(self.findings)),
        }
        for name, figure in rows.items():
            table.add_row(name, figure)
        return table
