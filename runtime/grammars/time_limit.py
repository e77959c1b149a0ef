"""A limit on the time that the grammar of one request may take in the engine loop, where other requests wait for it."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandemrt.engines.validation.errors import BadRequest

STEP_ALLOWANCE_S = 0.01  # not counted; a step usually takes 1 to 2 ms for a large vocabulary, rarely 5 ms


class GrammarTimeLimit:
    """Count the CPU seconds of this thread that a request's grammar takes.

    Each step may take ``STEP_ALLOWANCE_S``. Excess time accumulates; faster steps reduce it again. Work during which
    Python collects the garbage of the whole process does not count.

    Args:
        limit_s: limit of the accumulated excess time, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._excess_s = 0.0
        self.last_step_s = 0.0
        self.last_fill_s = 0.0  # of the last step that filled mask rows

    @contextmanager
    def shared_work(self) -> Iterator[None]:
        """Count a block of work that serves many requests. Its time is added without an allowance."""
        begun, collections = time.thread_time(), _full_collections()
        yield
        if _full_collections() == collections:
            self._excess_s += time.thread_time() - begun

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a block of work as one step.

        Raises BadRequest after the block if the accumulated excess time is above the limit.
        """
        begun, collections = time.thread_time(), _full_collections()
        yield
        self.last_step_s = time.thread_time() - begun
        if _full_collections() != collections:
            return
        self._excess_s = max(0.0, self._excess_s + self.last_step_s - STEP_ALLOWANCE_S)
        if self._excess_s > self._limit_s:
            raise BadRequest(
                f"structured_outputs: the grammar took {self.last_step_s:.2f} s for a step, and is "
                f"{self._excess_s:.2f} s beyond its share, more than {self._limit_s:g} s (fill_timeout_s); simplify it"
            )


def _full_collections() -> int:
    """Return how often Python has collected its oldest objects, which takes 0.1 s and more in a large process."""
    return int(gc.get_stats()[-1]["collections"])
