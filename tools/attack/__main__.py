"""What one client's stream feels while others attack, over the Python API and ``tandemrt serve``.

    python -m tools.attack engines/built/demo
    python -m tools.attack engines/built/demo --face http --only regex

Four clients send each attack at once while a victim streams. The bars: the 99th percentile of the victim's time between
two pieces is at most 250 ms, and at most three times what it is alone or beside four ordinary requests; who is refused
hears it within two seconds; memory rises by at most 5 % beyond what caches of grammars may hold. The exit code is 1 if
one is missed. Figures of a machine that does other work as well say little.
"""

import json
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

from tools.attack.clients import clients as behaviours
from tools.attack.faces import Face, Http, python_api, serve
from tools.attack.measure import Attacked, Felt, attacked, quiet
from tools.attack.requests import requests
from tools.memory import resident_mb

LONGEST_MS = 250.0
TIMES = 3.0
REFUSED_S = 2.0
GROWN = 1.05
CACHES_MB = 256.0
SHOWN = 70  # characters of an answer
ORDINARY = "an ordinary request"
FACES: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {"python": python_api, "http": serve}


class Faces(StrEnum):
    BOTH = "both"
    PYTHON = "python"
    HTTP = "http"


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
    face: Annotated[Faces, typer.Option(help="Where to attack.")] = Faces.BOTH,
    only: Annotated[str, typer.Option(help="Only attacks with this in their name.")] = "",
    clients: Annotated[int, typer.Option(min=1, help="Attackers at once.")] = 4,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds until an attack is left to itself.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Attack, and print what the victim felt."""
    console, missed, figures = Console(highlight=False), [], {}
    for name in [each for each in FACES if face in (Faces.BOTH, each)]:
        with FACES[name](bundle) as opened:
            found = run(opened, only, clients, limit, console)
        missed += found["missed"]
        figures[name] = found
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))
    for line in missed:
        console.print(f"- {line}", markup=False)
    if missed:
        raise typer.Exit(1)


def run(face: Face, only: str, clients: int, limit_s: float, console: Console) -> dict[str, Any]:
    """Attack one face; return its figures, and in ``missed`` a line for each bar that was not kept."""
    quiet(face, 0.5)  # what is slow the first time
    alone, start_mb = quiet(face, 3.0), resident_mb(face.pid)
    table = Table("attack", "p50", "p99", "longest, ms", "answered, s", "memory, MB", "answer", show_edge=False)
    table.add_row("nobody", *_spelled(alone), "", "", "")
    results: list[Attacked] = []
    for name, attack in _attacks(face, only).items():
        result = attacked(face, name, attack, clients=clients, limit_s=limit_s)
        results.append(result)
        answered = "never" if result.answered_s is None else f"{result.answered_s:.1f}"
        grown = f"{result.grown_mb:+.0f}"
        table.add_row(name, *_spelled(result.felt), answered, grown, result.answer.replace("\n", " ")[:SHOWN])
    end_mb = resident_mb(face.pid)
    missed = _missed(alone, results)
    if end_mb > GROWN * start_mb + CACHES_MB:
        missed.append(f"memory rose from {start_mb:.0f} to {end_mb:.0f} MB")
    console.print(f"{face.name}: {start_mb:.0f} MB before, {end_mb:.0f} MB after all attacks")
    console.print(table)
    return {
        "quiet": asdict(alone),
        "attacks": [asdict(result) for result in results],
        "memory_mb": [start_mb, end_mb],
        "missed": [f"{face.name}: {line}" for line in missed],
    }


def _attacks(face: Face, only: str) -> dict[str, Callable[[], str]]:
    attacks: dict[str, Callable[[], str]] = {
        name: partial(_sent, face, make) for name, make in requests().items() if only in name or name == ORDINARY
    }
    if isinstance(face, Http):
        attacks |= {name: partial(behave, face) for name, behave in behaviours().items() if only in name}
    return attacks


def _sent(face: Face, make: Callable[[], Any]) -> str:
    return face.send(make())


def _missed(alone: Felt, results: list[Attacked]) -> list[str]:
    """A line for each bar that an attack broke."""
    ordinary = next((result.felt.p99 for result in results if result.name == ORDINARY), 0.0)
    most_ms = min(LONGEST_MS, TIMES * max(alone.p99, ordinary))
    lines = []
    for result in results:
        if result.felt.p99 > most_ms:
            lines.append(f"{result.name}: the victim's p99 was {result.felt.p99:.0f} ms, of at most {most_ms:.0f}")
        if result.answered_s is None:
            lines.append(f"{result.name}: an attacker was never answered")
        elif result.answer.startswith("refused") and result.answered_s > REFUSED_S:
            lines.append(f"{result.name}: refused after {result.answered_s:.1f} s")
    return lines


def _spelled(felt: Felt) -> tuple[str, str, str]:
    return f"{felt.p50:.1f}", f"{felt.p99:.1f}", f"{felt.longest:.0f}"


if __name__ == "__main__":
    typer.run(main)
