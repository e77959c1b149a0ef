"""Run attempts from several client threads."""

import threading
import time
from collections.abc import Callable, Sequence

from tools.quality.soak.plans import Attempt

CLIENTS = 12


def run_concurrently(
    work: Callable[[Attempt], list[str]], attempts: Sequence[Attempt], limit_s: float
) -> list[list[str] | None]:
    """Run ``work`` for every attempt on CLIENTS threads; None for attempts that have not ended after ``limit_s``."""
    results: list[list[str] | None] = [None] * len(attempts)
    numbers = iter(range(len(attempts)))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(attempts[number])
            except Exception as error:
                results[number] = [f"{type(error).__name__}: {error}"]

    threads = [threading.Thread(target=client, name="soak", daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return results
