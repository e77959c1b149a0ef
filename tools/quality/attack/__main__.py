"""Measure the latency of one client's stream while other clients attack the Python API and ``tandemrt serve``.

    python -m tools.quality.attack engines/built/demo
    python -m tools.quality.attack engines/built/demo --frontend http --only regex

Four clients send each attack concurrently while a victim streams. The limits: the 99th percentile of the gaps between
two parts of the victim's stream is at most 250 ms, and at most three times its value when the victim is alone or next
to four ordinary requests; a refused client gets its answer within two seconds; memory rises by at most 5 % plus the
size of the grammar caches. The exit code is 1 if a limit is exceeded. Figures of a busy machine mean little.
"""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.runtime.llm.free_memory import trim_memory
from tools.bench.memory import resident_mb
from tools.bench.report import Json
from tools.quality.attack.behaviours import behaviours
from tools.quality.attack.files import model_file_attacks
from tools.quality.attack.frontends import Frontend, HttpFrontend, http_frontend, python_frontend
from tools.quality.attack.images import image_requests
from tools.quality.attack.measure import AttackResult, Gaps, measure_alone, measure_attack
from tools.quality.attack.process import file_attacks, process_attacks
from tools.quality.attack.requests import requests

MAX_P99_MS = 250.0
MAX_P99_RATIO = 3.0
MAX_REFUSAL_S = 2.0
MAX_MEMORY_RATIO = 1.05
CACHES_MB = 256.0
SHOWN = 70  # characters of an answer
ORDINARY = "an ordinary request"
FRONTENDS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {"python": python_frontend, "http": http_frontend}


class Choice(StrEnum):
    BOTH = "both"
    PYTHON = "python"
    HTTP = "http"


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle; image files attack one that reads images.")],
    frontend: Annotated[Choice, typer.Option(help="The interface to attack.")] = Choice.BOTH,
    only: Annotated[str, typer.Option(help="Only attacks with this text in their name.")] = "",
    clients: Annotated[int, typer.Option(min=1, help="Concurrent attackers.")] = 4,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which an attack is abandoned.")] = 30.0,
    out: Json = None,
) -> None:
    """Attack, and print the victim's latency."""
    console, exceeded, figures = Console(highlight=False), [], {}
    for name in [each for each in FRONTENDS if frontend in (Choice.BOTH, each)]:
        with FRONTENDS[name](bundle) as opened:
            outcome = run(opened, only, clients, limit, console)
        exceeded += outcome["exceeded"]
        figures[name] = outcome
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))
    for line in exceeded:
        console.print(f"- {line}", markup=False)
    if exceeded:
        raise typer.Exit(1)


def run(frontend: Frontend, only: str, clients: int, limit_s: float, console: Console) -> dict[str, Any]:
    """Attack one frontend; return its figures, with a line in ``exceeded`` for each limit that an attack exceeded."""
    measure_alone(frontend, 0.5)  # warm up
    alone, start_mb = measure_alone(frontend, 3.0), resident_mb(frontend.pid)
    table = Table("attack", "p50", "p99", "longest, ms", "answered, s", "memory, MB", "answer", show_edge=False)
    table.add_row("none", *_cells(alone), "", "", "")
    results: list[AttackResult] = []
    for name, attack in _attacks(frontend, only).items():
        result = measure_attack(frontend, name, attack, clients=clients, limit_s=limit_s)
        results.append(result)
        answered = "never" if result.answered_s is None else f"{result.answered_s:.1f}"
        growth = f"{result.growth_mb:+.0f}"
        table.add_row(name, *_cells(result.gaps), answered, growth, result.answer.replace("\n", " ")[:SHOWN])
    if frontend.pid == os.getpid():
        trim_memory()  # opening and closing bundles leaves free memory in the arenas of many threads
    end_mb = resident_mb(frontend.pid)
    exceeded = _exceeded(alone, results)
    if end_mb > MAX_MEMORY_RATIO * start_mb + CACHES_MB:
        exceeded.append(f"memory rose from {start_mb:.0f} to {end_mb:.0f} MB")
    console.print(f"{frontend.name}: {start_mb:.0f} MB before, {end_mb:.0f} MB after all attacks")
    console.print(table)
    return {
        "alone": asdict(alone),
        "attacks": [asdict(result) for result in results],
        "memory_mb": [start_mb, end_mb],
        "exceeded": [f"{frontend.name}: {line}" for line in exceeded],
    }


def _attacks(frontend: Frontend, only: str) -> dict[str, Callable[[], str]]:
    makes = requests() | (image_requests() if Bundle.read(frontend.bundle).manifest.vision is not None else {})
    attacks: dict[str, Callable[[], str]] = {
        name: partial(_send, frontend, make) for name, make in makes.items() if only in name or name == ORDINARY
    }
    more = file_attacks(frontend)
    if isinstance(frontend, HttpFrontend):
        more |= {name: partial(behave, frontend) for name, behave in behaviours().items()}
    else:
        more |= process_attacks(frontend) | model_file_attacks()
    return attacks | {name: attack for name, attack in more.items() if only in name}


def _send(frontend: Frontend, make: Callable[[], Any]) -> str:
    return frontend.send(make())


def _exceeded(alone: Gaps, results: list[AttackResult]) -> list[str]:
    """Return a line for each limit that an attack exceeded."""
    ordinary = next((result.gaps.p99 for result in results if result.name == ORDINARY), 0.0)
    most_ms = min(MAX_P99_MS, MAX_P99_RATIO * max(alone.p99, ordinary))
    lines = []
    for result in results:
        if result.gaps.p99 > most_ms:
            lines.append(f"{result.name}: the victim's p99 must be at most {most_ms:.0f} ms, got {result.gaps.p99:.0f}")
        if result.answered_s is None:
            lines.append(f"{result.name}: an attacker got no answer")
        if result.refused_s > MAX_REFUSAL_S:
            lines.append(f"{result.name}: refused after {result.refused_s:.1f} s")
    return lines


def _cells(gaps: Gaps) -> tuple[str, str, str]:
    return f"{gaps.p50:.1f}", f"{gaps.p99:.1f}", f"{gaps.longest:.0f}"


if __name__ == "__main__":
    typer.run(main)
