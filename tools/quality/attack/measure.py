"""Measure the gaps in a victim's stream during an attack."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tools.bench.memory import resident_mb
from tools.quality.attack.frontends import REFUSED, Frontend

AFTER_ATTACK_S = 0.2  # between the end of an attack and the reading of memory


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two parts of the victim's streams."""

    p50: float
    p99: float
    longest: float


@dataclass(frozen=True)
class AttackResult:
    """The effect of one attack.

    Attributes:
        gaps: of the victim's streams during the attack.
        answered_s: seconds that the slowest attacker waited for its answer; None if one still waits, or has failed.
        refused_s: the same of refused attackers; 0 if none was refused.
        answer: the end of one attacker's request.
        growth_mb: growth of resident memory.
    """

    name: str
    gaps: Gaps
    answered_s: float | None
    refused_s: float
    answer: str
    growth_mb: float


def measure_alone(frontend: Frontend, seconds: float) -> Gaps:
    """Return the gaps of a victim without attackers."""
    end = time.perf_counter() + seconds
    return _percentiles(_gaps(frontend, lambda: time.perf_counter() < end))


def measure_attack(
    frontend: Frontend, name: str, attack: Callable[[], str], *, clients: int, limit_s: float
) -> AttackResult:
    """Run ``clients`` concurrent attackers while the victim streams, for at most ``limit_s`` seconds."""
    before = resident_mb(frontend.pid)
    answers: list[tuple[float, str]] = []
    begun = time.perf_counter()

    def one() -> None:
        start = time.perf_counter()
        answer = attack()
        answers.append((time.perf_counter() - start, answer))

    attackers = [threading.Thread(target=one, daemon=True) for _ in range(clients)]

    def running() -> bool:
        return time.perf_counter() < begun + limit_s and any(each.is_alive() for each in attackers)

    gaps = _gaps(frontend, running, attackers=attackers)
    for attacker in attackers:
        attacker.join(max(0.0, begun + limit_s - time.perf_counter()))
    stuck = any(attacker.is_alive() for attacker in attackers)
    time.sleep(AFTER_ATTACK_S)
    return AttackResult(
        name,
        _percentiles(gaps),
        None if stuck or len(answers) < clients else max(waited for waited, _ in answers),
        max((waited for waited, answer in answers if answer.startswith(REFUSED)), default=0.0),
        answers[0][1] if answers else "no answer",
        resident_mb(frontend.pid) - before,
    )


def _gaps(frontend: Frontend, running: Callable[[], bool], attackers: Iterable[threading.Thread] = ()) -> list[float]:
    """Stream repeatedly while ``running``; start the attackers at the first part of the first stream."""
    gaps: list[float] = []
    while True:
        times = []
        for at in frontend.stream():
            for attacker in attackers:
                attacker.start()
            attackers = ()
            times.append(at)
        gaps += [later - earlier for earlier, later in pairwise(times)]
        if not running():
            return gaps


def _percentiles(gaps: list[float]) -> Gaps:
    ms = 1e3 * np.array(gaps)
    return Gaps(float(np.percentile(ms, 50)), float(np.percentile(ms, 99)), float(ms.max()))
