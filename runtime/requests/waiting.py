"""A request in the queue: all that could be made of it before it has a slot."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.text import Transcript


class Enforcement(NamedTuple):
    """What holds a request to what was asked: while it runs, and once its text is finished (None: nothing).

    ``check`` begins to check a finished text, off the loop; the future is what is wrong with it, or None.
    """

    constraint: Constraint
    check: "Callable[[str], Future[str | None]] | None" = None


@dataclass(frozen=True, eq=False)
class Waiting:
    """Waits for ``enforcement`` (a grammar is compiled off the loop), for a slot, and for room in the caches.

    ``transcript`` is empty; it and ``penalties`` are made here because that costs the loop nothing.
    """

    request: Request
    enforcement: "Future[Enforcement]"
    transcript: Transcript
    penalties: Penalties | None

    @property
    def ready(self) -> bool:
        """Whether nothing but a slot is missing."""
        return self.enforcement.done() and self.enforcement.exception() is None

    def dropped(self, now: float) -> "Dropped | None":
        """Why the request must leave the queue at ``now``, None if it may stay."""
        reason = self.request.interrupted(now)
        failure = self.enforcement.exception() if self.enforcement.done() else None
        if reason is None and failure is None:
            return None
        return Dropped(self.request, reason or "error", failure)


class Dropped(NamedTuple):
    """A request that leaves the queue and gets no slot, and why."""

    request: Request
    reason: str
    failure: BaseException | None
