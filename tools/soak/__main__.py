"""Soak the runtime with random requests of every kind.

    python -m tools.soak --minutes 10
    python -m tools.soak --requests 100000 --seed 7 --json soak.json

Tiny models are made on the spot. Every answer is held against what the same request gets alone (one that was cancelled
or ran out of time must be a beginning of it), the runtime's counters against what the answers say, and memory and
threads against what they were. Faults of the named kinds break one request in ten. The exit code is 1 on any finding.
"""

import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandemrt.runtime.llm import LLM
from tools.soak.drive import PATIENCE_S, Driver, Reference
from tools.soak.faults import KINDS, Faults, breaking_transcripts
from tools.soak.models import build_bundles
from tools.soak.plans import draw_plans, draw_turn
from tools.soak.served import served_wave, serving

DISTINCT = 400  # requests to draw from: each must be run alone once
WAVE = 50
FLOOD = 30
QUEUE = 20
SHOWN = 20  # findings that are printed
GROWTH_MB = 48.0  # that the allocators of a long run may spread over


@dataclass
class Soaked:
    """What a run came to. ``memory_mb`` and ``threads`` were taken after every wave, with nothing running."""

    seed: int
    faults: list[str]
    requests: int = 0
    served: int = 0
    refused: int = 0
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


def soak(
    *,
    requests: int | None,
    minutes: float | None,
    seed: int = 0,
    faults: tuple[str, ...] = tuple(KINDS),
    distinct: int = DISTINCT,
    triton: bool = False,
    patience_s: float = PATIENCE_S,
    console: Console | None = None,
) -> Soaked:
    """Send ``requests``, or as many as ``minutes`` have room for, in waves; return what was found."""
    # What breaks on purpose is logged by the runtime; what breaks otherwise is a finding.
    logging.getLogger("tandemrt").setLevel(logging.CRITICAL + 1)
    result, start = Soaked(seed, list(faults)), time.monotonic()
    plans, draw = draw_plans(Random(seed), distinct), Random(seed + 1)
    columns = (TextColumn("soaking"), MofNCompleteColumn(), TextColumn("{task.fields[found]} findings"))
    console = console or Console(quiet=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandemrt-soak-")))
        bundles = build_bundles(folder)
        reference = Reference(stack.enter_context(LLM(bundles["model"], threads=1)), plans)
        rejecting = {"ngram": Reference(stack.enter_context(LLM(bundles["ngram"], threads=1)), plans)}
        drivers = []
        for kind, overlap in (("model", True), ("model", False), ("ngram", True)):
            llm = stack.enter_context(LLM(bundles[kind], threads=1, overlap=overlap, queue_limit=QUEUE))
            name = f"{kind}, {'overlap' if overlap else 'lockstep'}"
            drivers.append(Driver(name, llm, Faults(llm), plans, rejecting.get(kind, reference), patience_s=patience_s))
        server = stack.enter_context(serving(bundles["model"], folder)) if triton else None
        stack.enter_context(breaking_transcripts([driver.faults for driver in drivers]))
        progress = stack.enter_context(
            Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        )
        task = progress.add_task("soak", total=requests, found=0)
        number = 0
        while not _over(result.requests, requests, time.monotonic() - start, minutes):
            driver = drivers[number % len(drivers)]
            size = WAVE if requests is None else min(WAVE, requests - result.requests)
            leaving = number % 2 == 1
            turns = [draw_turn(draw, plans, faults, streams_leave=leaving) for _ in range(size)]
            result.findings += driver.wave(turns, flood=FLOOD if number % 4 < 3 and size == WAVE else 0)
            if server is not None:
                result.findings += served_wave(server, turns, plans, reference)
                result.served += len(turns)
            result.requests += size
            gc.collect()
            result.memory_mb.append(_resident_mb())
            result.threads.append(threading.active_count())
            progress.update(task, completed=result.requests, found=len(result.findings))
            number += 1
            if driver.stuck:  # not even closing would come to an end
                stack.pop_all()
                break
        result.stuck = any(driver.stuck for driver in drivers)
        for driver in drivers:
            result.ended += driver.ended
            result.refused += driver.refused
            result.strikes += driver.faults.strikes
    result.seconds = time.monotonic() - start
    result.findings += _flat(result, lasting=len(drivers))
    return result


def main(
    minutes: Annotated[float | None, typer.Option(min=0.0, help="How long; 5 if --requests is not given.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many requests, floods not counted.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="What is asked, and what happens to it.")] = 0,
    faults: Annotated[
        str, typer.Option(help=f"Kinds, with commas, of {', '.join(KINDS)}; none switches them off.")
    ] = ",".join(KINDS),
    triton: Annotated[bool, typer.Option("--triton", help="Send every wave to a Triton server as well.")] = False,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds until a wave counts as stuck.")] = PATIENCE_S,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Soak the runtime, and print what was found."""
    console = Console(highlight=False)
    kinds = tuple(kind for kind in faults.split(",") if kind != "none")
    if unknown := set(kinds) - KINDS.keys():
        console.print(f"--faults: must be of {', '.join(KINDS)}, received {sorted(unknown)[0]!r}; choose among them")
        raise typer.Exit(2)
    minutes = 5.0 if minutes is None and requests is None else minutes
    result = soak(
        requests=requests,
        minutes=minutes,
        seed=seed,
        faults=kinds,
        triton=triton,
        patience_s=patience,
        console=console,
    )
    console.print(_table(result))
    for finding in result.findings[:SHOWN]:
        console.print(f"- {finding}", markup=False)
    repeat = f"python -m tools.soak --requests {result.requests} --seed {seed} --faults {faults}"
    console.print(f"{len(result.findings)} findings; to repeat it: {repeat}{' --triton' if triton else ''}")
    if out is not None:
        out.write_text(json.dumps({**vars(result), "growth_mb": result.growth_mb}, indent=2) + "\n")
    if result.stuck:  # the interpreter would wait for whoever waits
        sys.stdout.flush()
        os._exit(1)
    if result.findings:
        raise typer.Exit(1)


def _over(done: int, requests: int | None, seconds: float, minutes: float | None) -> bool:
    enough = requests is not None and done >= requests
    return enough or (minutes is not None and seconds >= 60 * minutes)


def _flat(result: Soaked, *, lasting: int) -> list[str]:
    """Threads must not grow once every runtime has run; memory may by no more than the allocators keep."""
    lines, settled = [], result.threads[2 * lasting :]
    if settled and settled[-1] > settled[0]:
        lines.append(f"threads rose from {settled[0]} to {settled[-1]}")
    if result.growth_mb > max(GROWTH_MB, 0.05 * result.memory_mb[-1]):
        lines.append(f"memory rose by {result.growth_mb:.0f} MB, to {result.memory_mb[-1]:.0f} MB")
    return lines


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _table(result: Soaked) -> Table:
    table = Table("what", "figure", show_edge=False)
    ended = ", ".join(f"{reason} {count}" for reason, count in sorted(result.ended.items()))
    rows = {
        "requests, floods not counted": f"{result.requests} in {result.seconds:.0f} s",
        "over Triton as well": str(result.served),
        "answered, floods included": f"{sum(result.ended.values())} ({ended})",
        "refused": str(result.refused),
        "engines that were made to fail": str(result.strikes),
        "memory at the end, growth": f"{result.memory_mb[-1]:.0f} MB, {result.growth_mb:+.0f} MB",
        "threads at the end": str(result.threads[-1]),
        "findings": str(len(result.findings)),
    }
    for what, figure in rows.items():
        table.add_row(what, figure)
    return table


if __name__ == "__main__":
    typer.run(main)
