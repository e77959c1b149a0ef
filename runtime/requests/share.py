"""How much of the loop's time the grammar of one request may take: the others wait for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandemrt.engines.errors import BadRequest

FREE_S = 0.01  # of a step; a window of a large vocabulary takes one or two thousandths, and seldom five


class GrammarShare:
    """Counts the processor's seconds that a request's grammar takes, whatever else the machine does.

    A step may take ``FREE_S``. What steps take beyond that adds up, to ``most_s``; what they leave of it comes off.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._beyond = 0.0
        self.newest = 0.0  # what the last step took, in seconds
        self.filled_s = 0.0  # and the last one that filled masks

    @contextmanager
    def between(self) -> Iterator[None]:
        """Count the block, which is done for many requests at once, with the next step."""
        begun = time.thread_time()
        yield
        self._beyond += time.thread_time() - begun

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the block. Raises BadRequest behind it if the request has had its share, so at most one step late."""
        begun = time.thread_time()
        yield
        self.newest = time.thread_time() - begun
        self._beyond = max(0.0, self._beyond + self.newest - FREE_S)
        if self._beyond > self._most_s:
            raise BadRequest(
                f"structured_outputs: the grammar took {self.newest:.2f} s for a step, and is {self._beyond:.2f} s "
                f"beyond its share, more than {self._most_s:g} s (fill_timeout_s); simplify it"
            )
