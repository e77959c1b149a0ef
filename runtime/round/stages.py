"""The stages of a round, each counted and timed: the verbs that the loop's timetables are made of."""

from typing import Any

from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.fill import Filler
from tandemrt.runtime.round.round import Round, Verified
from tandemrt.runtime.round.tandem import Tandem
from tandemrt.runtime.round.timeline import Timeline


class Stages:
    """``commit`` waits for the device, the others only enqueue or work on the host."""

    def __init__(
        self,
        tandem: Tandem,
        drafter: Drafter,
        filler: Filler,
        committer: Committer,
        clock: Clock,
        metrics: Metrics,
        timeline: Timeline,
    ) -> None:
        self._tandem = tandem
        self._drafter = drafter
        self._filler = filler
        self._committer = committer
        self._clock = clock
        self._metrics = metrics
        self._timeline = timeline

    def propose(self, this: Round) -> Buffer | None:
        """Draft; see Drafter.propose."""
        if not this.window:
            self._drafter.skip(this)
            return None
        with self._metrics.timed("propose"), self._timeline.span("propose"):
            return self._drafter.propose(this)

    def fetch(self, this: Round, last: Verified | None) -> Any:
        """Copy to the host what it will wait for: tokens of the ``last`` round, and drafts if the device made them.

        Returns a mark behind the copies.
        """
        buffers = self._tandem.buffers
        with self._clock.copies(behind=True):
            if last is not None:
                buffers.tokens.copy_out(last.round.batch, last.round.window + 1)
                buffers.count.copy_out(last.round.batch)
            if self._drafter.ahead and this.window:
                buffers.draft_tokens.copy_out(this.batch, this.window)
        return self._clock.mark_copies()

    def score(self, this: Round) -> None:
        """Run the target over the window; see Tandem.score."""
        with self._metrics.timed("target"), self._timeline.span("target"):
            self._tandem.score(this)
            self._drafter.scored(this)

    def commit(self, last: Verified | None, mark: Any) -> None:
        """Wait for what was fetched, the one wait of a round, and turn the ``last`` round's tokens into text."""
        with self._metrics.timed("wait"):
            self._clock.wait(mark)
        with self._metrics.timed("commit"):
            if last is not None:
                self._committer.commit(last)

    def fill(self, this: Round) -> dict[int, int]:
        """Write masks, draft lengths and adjusted tokens; see Filler.fill."""
        with self._metrics.timed("fill"):
            return self._filler.fill(this)

    def verify(self, this: Round, draft_probs: Buffer | None, usable: dict[int, int]) -> Verified:
        """Adjust and verify the window and advance the slots, behind the copies that ``fill`` enqueued."""
        self._clock.join()
        with self._metrics.timed("verify"), self._timeline.span("verify"):
            self._tandem.adjust(this)
            self._tandem.verify(this, draft_probs)
            self._drafter.verified(this)
        self._timeline.collect()
        self._metrics.rounds += 1
        self._metrics.waits = self._clock.waits
        return Verified(this, usable)
