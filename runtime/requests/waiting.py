"""A request in the queue: all that could be made of it before it has a slot."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.share import GrammarShare
from tandemrt.runtime.requests.text import Transcript

if TYPE_CHECKING:
    from tandemrt.runtime.requests.running import Running


class Enforcement(NamedTuple):
    """What holds a request to what was asked: while it runs, and once its text is finished (None: nothing).

    ``check`` begins to check a finished text, off the loop; the future is what is wrong with it, or None. ``share`` is
    the time that its grammar may take, None without one.
    """

    constraint: Constraint
    check: "Callable[[str], Future[str | None]] | None" = None
    share: GrammarShare | None = None


@dataclass(frozen=True, eq=False)
class Waiting:
    """Waits for ``enforcement`` (a grammar is compiled off the loop), for a slot, and for room in the caches.

    ``transcript`` is empty; it, ``penalties`` and ``hashes`` are made here because that costs the loop nothing.
    ``hashes`` is None where texts share nothing in the caches. ``preempted`` is what a request that had to give its
    slot back goes on with, None for one that never had one. ``leader`` has the same prompt and comes first: what it
    puts into the caches need not be computed again.
    """

    request: Request
    enforcement: "Future[Enforcement]"
    transcript: Transcript
    penalties: Penalties | None
    hashes: BlockHashes | None = None
    preempted: "Running | None" = None
    leader: Request | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """What must be in the caches before the request goes on, and behind it the first token that a round feeds."""
        return self.request.prompt if self.preempted is None else self.preempted.tokens

    @property
    def ready(self) -> bool:
        """Whether nothing but a slot is missing."""
        return self.enforced and not self.follows

    @property
    def enforced(self) -> bool:
        """Whether ``enforcement`` has been made."""
        return self.enforcement.done() and self.enforcement.exception() is None

    @property
    def follows(self) -> bool:
        """Whether the leader has not put the prompt into the caches yet."""
        return self.leader is not None and not (self.leader.prompt_known or self.leader.finished)

    def dropped(self, now: float) -> "Dropped | None":
        """Why the request must leave the queue at ``now``, None if it may stay."""
        reason = self.request.interrupted(now)
        failure = self.enforcement.exception() if self.enforcement.done() else None
        if reason is None and failure is None:
            return None
        return Dropped(self, reason or "error", failure)


class Dropped(NamedTuple):
    """Who leaves the queue and gets no slot, and why."""

    waiting: Waiting
    reason: str
    failure: BaseException | None
