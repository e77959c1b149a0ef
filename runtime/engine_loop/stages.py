"""What a round does on the device and on the host, one method each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.runtime.device.buffers import Buffer, replace_drafts, write_drafts
from tandemrt.runtime.device.streams import HostCopy, Streams
from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.drafter import Drafter, Lookup
from tandemrt.runtime.engine_loop.target import TargetRunner
from tandemrt.runtime.engine_loop.verify_inputs import DraftsToVerify, VerifyInputWriter
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.round import Round, VerifiedRound


class RoundStages:
    """The stages of a round, in order, with metrics; the schedules of EngineLoop call them.

    Only ``commit`` and ``wait_for_drafts`` wait for the device.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter,
        lookup: Lookup | None,
        verify_inputs: VerifyInputWriter,
        committer: Committer,
        streams: Streams,
        metrics: Metrics,
        timeline: Timeline,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._lookup = lookup
        self._proposed = False  # whether the drafter proposes in the round in progress
        self._lacks_copies = False  # whether the drafts on the device lack copies that are looked up later
        self._verify_inputs = verify_inputs
        self._committer = committer
        self._streams = streams
        self._metrics = metrics
        self._timeline = timeline

    def read_text(self, round_: Round) -> Round:
        """Return the round with its drafts from the text and the window that it needs. Call after the last commit."""
        planned = round_.window
        with self._metrics.timed("fill"):
            round_ = round_.with_fast_forward() if round_.may_fast_forward else round_
            for running in round_.rows.values():
                running.replay.mark_planned()
        if self._lookup is None or not round_.may_copy or (round_.only_fast_forward and round_.num_proposed):
            return round_
        with self._metrics.timed("propose"):
            round_ = replace(round_, window=planned)
            copies = self._lookup.copies(round_, proposed=False)
            return round_.with_copies(copies, drafter=self._drafter.window > 0)

    def look_up(self, round_: Round) -> Round:
        """Return the round with its copies from the text. Call after the last commit.

        Without copies and drafts of a model the window is 0.
        """
        assert self._lookup is not None
        with self._metrics.timed("propose"):
            round_ = replace(round_, copied=self._lookup.copies(round_, proposed=self._proposed))
            undrafted = self._drafter.window > 0 and not round_.num_proposed and not round_.copied
            return replace(round_, window=0) if undrafted and round_.prompts == NO_PROMPTS else round_

    def propose(self, round_: Round) -> Buffer | None:
        """Write the drafts of the round; return their probabilities, see Drafter.propose."""
        self._proposed = self._has_drafter_for(round_)
        self._lacks_copies = self._proposed or not round_.copied
        if not self._proposed:
            drafts, window = self._target.buffers.draft_tokens, round_.window
            if window:
                write_drafts(drafts, round_.batch, window, round_.drafted_from_text)
            self._drafter.skip(round_)
            return None
        self._target.buffers.num_drafted = round_.window  # unless the drafter stops early
        with self._metrics.timed("propose"), self._timeline.span("propose"):
            return self._drafter.propose(round_)

    def drafted(self, round_: Round) -> Round:
        """Return the round with the window that the drafter has proposed, which may have stopped early."""
        tokens = self._target.buffers.num_drafted
        return round_.drafted(tokens) if self._proposed and tokens < round_.window else round_

    def fetch_drafts(self, round_: Round) -> Any:
        """Enqueue the copy of the drafts of ``round_`` to the host; return an event that follows it, if it has any."""
        if not round_.window:
            return None
        with self._streams.copies(after_work=True):
            self._target.buffers.draft_tokens.copy_out(round_.batch, round_.window)
        return self._streams.record_copies()

    def _fetch_tokens(self, round_: Round, logits: Mapping[int, HostCopy]) -> Any:
        """Enqueue copies of what a verified round emits to the host; return an event that follows them."""
        buffers = self._target.buffers
        with self._streams.copies(after_work=True):
            buffers.tokens.copy_out(round_.batch, round_.window + 1)
            buffers.count.copy_out(round_.batch)
            for each in logits.values():
                each.copy_out()
        return self._streams.record_copies()

    def wait_for_drafts(self, round_: Round) -> None:
        """Copy drafts that were proposed after the commit to the host, and wait for the copy."""
        if self._proposed:
            with self._metrics.timed("wait"):
                self._streams.wait(self.fetch_drafts(round_))

    def replace_drafts(self, round_: Round) -> None:
        """Replace drafts, which must be on the host, by copies from the text."""
        if self._lacks_copies and round_.copied:
            replace_drafts(self._target.buffers.draft_tokens, round_.batch, round_.window, round_.copied)

    def score(self, round_: Round) -> None:
        """Run the target over the draft window; see TargetRunner.score."""
        with self._metrics.timed("target"), self._timeline.span("target"):
            self._target.score(round_)
            self._drafter.after_target(round_)

    def commit(self, last: VerifiedRound | None, drafts: Any = None) -> None:
        """Wait for the tokens of the ``last`` round, turn them into text, and wait for ``drafts`` (fetch_drafts).

        The device is busy with drafts, and with prompts that the drafter reads, while the host has the tokens.
        """
        if last is not None:
            self._wait(last.arrived)
            with self._metrics.timed("commit"):
                self._committer.commit(last)
        if last is None or drafts is not None:
            self._wait(drafts)

    def _wait(self, arrived: Any) -> None:
        with self._metrics.timed("wait"):
            try:
                self._streams.wait(arrived)
            finally:
                self._target.check()

    def read_prompts(self, round_: Round) -> None:
        """Let the drafter process the prompts of a round, at its end."""
        if round_.prompts == NO_PROMPTS or not self._drafter.reads_prompts_late:
            return
        with self._metrics.timed("draft_prompts"), self._timeline.span("draft_prompts"):
            self._drafter.read_prompts(round_)

    def deliver(self) -> None:
        """Pass on what the last commit has appended, while the device is busy; see Committer.deliver."""
        with self._metrics.timed("deliver"):
            self._committer.deliver()

    def write_inputs(self, round_: Round, draft_probs: Buffer | None) -> DraftsToVerify:
        """Write masks, draft lengths and adjusted tokens; return the drafts to verify.

        The ``draft_probs`` of drafts from the text become zero, because these tokens were not sampled.
        """
        with self._metrics.timed("fill"):
            drafts = self._verify_inputs.write(round_)
        if not self._proposed:
            return drafts
        for slot, draft in drafts.alone.items():
            from_text = range(len(draft.tokens)) if slot in round_.copied else draft.fast_forward
            kept = 0 if slot in round_.copied else draft.num_from_drafter
            if from_text and kept < len(draft.tokens):
                self._drafter.replaced(round_.rows[slot], kept)
            if draft_probs is not None:
                probs = draft_probs.view(round_.batch, round_.window, self._target.vocab)
                for position in from_text:
                    probs[slot, position].zero_()
        return drafts

    def _has_drafter_for(self, round_: Round) -> bool:
        return self._drafter.window > 0 and round_.needs_drafter

    def verify(self, round_: Round, draft_probs: Buffer | None, drafts: DraftsToVerify) -> VerifiedRound:
        """Adjust logits, verify the drafts and advance the slots, after the copies that ``write_inputs`` enqueued."""
        self._streams.wait_for_copies_on_device()
        with self._metrics.timed("verify"), self._timeline.span("verify"):
            logits = self._copied_logits(round_, "raw")
            self._target.adjust(round_)
            logits |= self._copied_logits(round_, "processed")
            self._target.verify(round_, draft_probs)
            arrived = self._fetch_tokens(round_, logits)
            self._drafter.after_verify(round_)
        self.read_prompts(round_)
        self._timeline.collect()
        self._metrics.rounds += 1
        self._metrics.waits = self._streams.waits
        from_drafter = drafts.from_drafter
        if round_.copied and self._drafter.window:
            from_drafter = {slot: count for slot, count in from_drafter.items() if slot not in round_.copied}
        return VerifiedRound(round_, drafts.lengths, from_drafter, logits, arrived)

    def _copied_logits(self, round_: Round, mode: str) -> dict[int, HostCopy]:
        """Copy the logits of requests with this ``logprobs_mode``, because the next round overwrites them."""
        wanted = {
            slot
            for slot, running in round_.rows.items()
            if running.request.params.logprobs is not None and running.request.params.logprobs_mode == mode
        }
        if not wanted:
            return {}
        logits = self._target.buffers.logits.view(round_.batch, round_.window + 1, self._target.vocab)
        return {slot: HostCopy(logits[slot]) for slot in wanted}
