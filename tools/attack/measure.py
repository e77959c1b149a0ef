"""What a victim feels while an attack goes on."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tools.attack.faces import Face
from tools.memory import resident_mb

SETTLE_S = 0.2  # between an attack's end and the look at what it left


@dataclass(frozen=True)
class Felt:
    """Milliseconds between two pieces of the victim's streams."""

    p50: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Attacked:
    """One attack: what the victim felt, and what became of the attackers.

    Attributes:
        answered_s: how long the slowest attacker waited for its answer; None: one still waits.
        answer: how one of them ended.
        grown_mb: resident memory afterwards, beyond what it was before.
    """

    name: str
    felt: Felt
    answered_s: float | None
    answer: str
    grown_mb: float


def quiet(face: Face, seconds: float) -> Felt:
    """What the victim feels alone."""
    end = time.perf_counter() + seconds
    return _felt(_gaps(face, lambda: time.perf_counter() < end))


def attacked(face: Face, name: str, attack: Callable[[], str], *, clients: int, limit_s: float) -> Attacked:
    """Let ``clients`` attack at once, while the victim streams as long as they do, at most ``limit_s`` seconds."""
    before = resident_mb(face.pid)
    answers: list[tuple[float, str]] = []
    begun = time.perf_counter()

    def one() -> None:
        start = time.perf_counter()
        answer = attack()
        answers.append((time.perf_counter() - start, answer))

    attackers = [threading.Thread(target=one, daemon=True) for _ in range(clients)]

    def going_on() -> bool:
        return time.perf_counter() < begun + limit_s and any(each.is_alive() for each in attackers)

    gaps = _gaps(face, going_on, meanwhile=attackers)
    for attacker in attackers:
        attacker.join(max(0.0, begun + limit_s - time.perf_counter()))
    stuck = any(attacker.is_alive() for attacker in attackers)
    time.sleep(SETTLE_S)
    return Attacked(
        name,
        _felt(gaps),
        None if stuck else max(waited for waited, _ in answers),
        answers[0][1] if answers else "never answered",
        resident_mb(face.pid) - before,
    )


def _gaps(face: Face, going_on: Callable[[], bool], meanwhile: Iterable[threading.Thread] = ()) -> list[float]:
    """Stream again and again while ``going_on``; the attackers begin with the first piece of the first stream."""
    gaps: list[float] = []
    while True:
        times = []
        for at in face.stream():
            for attacker in meanwhile:
                attacker.start()
            meanwhile = ()
            times.append(at)
        gaps += [later - earlier for earlier, later in pairwise(times)]
        if not going_on():
            return gaps


def _felt(gaps: list[float]) -> Felt:
    ms = 1e3 * np.array(gaps)
    return Felt(float(np.percentile(ms, 50)), float(np.percentile(ms, 99)), float(ms.max()))
