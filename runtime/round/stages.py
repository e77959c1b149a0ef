"""The stages of a round, each counted and timed: the verbs that the loop's timetables are made of."""

from dataclasses import replace
from typing import Any

from tandemrt.engines.calls import NO_PROMPTS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.round.buffers import Buffer, write_drafts
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.fill import Filler, Window
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

    def foresee(self, this: Round) -> Round:
        """Find out what constraints leave no choice about, before anything is drafted, and how much will be."""
        with self._metrics.timed("fill"):
            this = this.foreseen() if this.forces else this
        if this.covered or this.prompts != NO_PROMPTS:  # whose places in the calls are fixed
            return this
        return replace(this, window=self._drafter.needed(this))

    def propose(self, this: Round) -> Buffer | None:
        """Draft; see Drafter.propose. Nobody is asked for what is known to follow."""
        if this.covered:
            write_drafts(self._tandem.buffers.draft_tokens, this.batch, this.window, this.forced)
        if this.covered or not this.window:
            self._drafter.skip(this)
            return None
        with self._metrics.timed("propose"), self._timeline.span("propose"):
            return self._drafter.propose(this)

    def fetch(self, this: Round | None, last: Verified | None) -> Any:
        """Copy to the host what it will wait for: tokens of the ``last`` round, and drafts that the device made for
        ``this`` one.

        Returns a mark behind the copies.
        """
        buffers = self._tandem.buffers
        with self._clock.copies(behind=True):
            if last is not None:
                buffers.tokens.copy_out(last.round.batch, last.round.window + 1)
                buffers.count.copy_out(last.round.batch)
            if this is not None and this.window:
                buffers.draft_tokens.copy_out(this.batch, this.window)
        return self._clock.mark_copies()

    def await_drafts(self, this: Round) -> None:
        """Wait for drafts that the device made behind the commit. The others are on the host."""
        if self._drafter.ahead and this.window and not this.covered:
            mark = self.fetch(this, None)
            with self._metrics.timed("wait"):
                self._clock.wait(mark)

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

    def fill(self, this: Round, draft_probs: Buffer | None) -> dict[int, Window]:
        """Write masks, draft lengths and adjusted tokens; see Filler.fill.

        The drafter hears which of its drafts gave way to others, and those come from none of the laws in
        ``draft_probs``.
        """
        with self._metrics.timed("fill"):
            filled = self._filler.fill(this)
        for slot, running in this.rows.items():
            window = filled.get(slot)
            if window is None or not window.forced:
                continue
            if not this.covered and window.kept < len(window.tokens):
                self._drafter.overruled(running, window.kept)
            if draft_probs is not None:
                laws = draft_probs.view(this.batch, this.window, self._tandem.vocab)
                for at in window.forced:
                    laws[slot, at].zero_()
        return filled

    def verify(self, this: Round, draft_probs: Buffer | None, filled: dict[int, Window]) -> Verified:
        """Adjust and verify the window and advance the slots, behind the copies that ``fill`` enqueued."""
        self._clock.join()
        with self._metrics.timed("verify"), self._timeline.span("verify"):
            logits = self._copied_logits(this, "raw")
            self._tandem.adjust(this)
            logits |= self._copied_logits(this, "sampled")
            self._tandem.verify(this, draft_probs)
            self._drafter.verified(this)
        self._timeline.collect()
        self._metrics.rounds += 1
        self._metrics.waits = self._clock.waits
        usable = {slot: len(window.tokens) for slot, window in filled.items()}
        return Verified(this, usable, {slot: window.kept for slot, window in filled.items()}, logits)

    def _copied_logits(self, this: Round, law: str) -> dict[int, torch.Tensor]:
        """Copies for those who ask for logprobs by this ``law``: the next round writes over them before the commit."""
        asked = {
            slot
            for slot, running in this.rows.items()
            if running.request.params.logprobs is not None and running.request.params.logprobs_law == law
        }
        logits = self._tandem.buffers.logits.view(this.batch, this.window + 1, self._tandem.vocab) if asked else None
        return {} if logits is None else {slot: logits[slot].clone() for slot in asked}
