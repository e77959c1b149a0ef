"""Commit rounds: append their tokens to the texts, end requests, notify listeners."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.drafter import Lookup
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.logprobs import TokenLogprobs, token_logprobs
from tandemrt.runtime.requests.request import Finish, Request, StreamOutput
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import DroppedRequest, RunningRequest
from tandemrt.runtime.requests.slots import PendingValidations, Slots
from tandemrt.runtime.requests.text import TextDelta

log = logging.getLogger(__name__)


class Committer:
    """Commits rounds and ends requests. Listeners are notified after slots and metrics are updated."""

    def __init__(
        self,
        buffers: RoundBuffers,
        slots: Slots,
        validations: PendingValidations,
        draft_windows: DraftWindowPlanner,
        metrics: Metrics,
        lookup: Lookup | None = None,
    ) -> None:
        """``lookup``: learns which of its copies are accepted, where a drafter could draft instead."""
        self._buffers = buffers
        self._slots = slots
        self._lookup = lookup
        self._validations = validations
        self._draft_windows = draft_windows
        self._metrics = metrics

    def commit(self, verified: VerifiedRound) -> None:
        """Append the emitted tokens of a round, which must be on the host, to the texts."""
        round_ = verified.round
        tokens = self._buffers.tokens.host_view(round_.batch, round_.window + 1).tolist()
        counts = self._buffers.count.host_view(round_.batch).tolist()
        num_accepted = 0
        for slot, running in round_.rows.items():
            if not running.finished:  # cancelled since
                emitted = tokens[slot][: counts[slot]]
                if running.replay.rereading:
                    self._reread_one(running, emitted)
                    continue
                if slot in verified.num_from_drafter:
                    num_accepted += self._observe_acceptance(running, emitted, verified)
                self._commit_one(running, emitted, verified)
        if round_.adaptive and round_.rows and not round_.copied:
            window = round_.num_proposed if round_.needs_drafter else 0
            accepted = num_accepted / len(round_.rows)
            self._draft_windows.observe_round(round_.batch, window, accepted, missed=round_.missed)

    def end(self, running: RunningRequest, finish: Finish | None) -> None:
        """End a request and free its slot. Raises nothing; errors are logged and affect no other request.

        A request whose text has finished keeps its finish reason. A ``finish`` of None means that the text has
        finished. If ``validate_output`` is set, the slot is freed now, and ``finish_validated`` notifies the listener
        after the validation.
        """
        self._end(running, finish, lambda: self._slots.leave(running.slot))

    def drop(self, dropped: DroppedRequest) -> None:
        """End a request that left the queue without a slot; a preempted one keeps its text. Raises nothing."""
        queued, finish = dropped
        if queued.preempted is not None:
            self._end(queued.preempted, finish, lambda: None)
            return
        request = queued.request
        request.finish(finish)
        self._count_end(request)
        self._notify_output(request)

    def finish_validated(self, running: RunningRequest, finish: Finish | None) -> None:
        """End a request by the result of its validation, or with ``finish`` before the result. Raises nothing."""
        request = running.request
        try:
            with ExitStack() as always:
                always.callback(self._notify_end, running)
                always.callback(self._count_end, request)
                if finish is None:
                    running.finish_validated()
                else:
                    running.finish(finish)
        except BaseException:
            log.exception("a validated request ended (%s), but an error occurred meanwhile", request.finish_reason)

    def _end(self, running: RunningRequest, finish: Finish | None, leave: Callable[[], None]) -> None:
        request = running.request
        checked = finish is None and running.validation is not None
        try:
            with ExitStack() as always:  # callbacks run last to first, even if others raise
                if not checked:
                    always.callback(self._notify_end, running)
                    always.callback(self._count_end, request)
                always.callback(leave)
                if checked:
                    always.callback(running.notify)
                    always.callback(self._validations.add, running)
                else:
                    self._count_tokens(running, () if finish is None else running.finish(finish))
                self._metrics.forced_ends += running.forced_ends
                self._metrics.reasoning_ends_mid_round += running.reasoning_ends_mid_round
        except BaseException:
            log.exception("a request ended (%s), but an error occurred meanwhile", request.finish_reason)

    def _observe_acceptance(self, running: RunningRequest, emitted: list[int], verified: VerifiedRound) -> int:
        """Count the drafts of a request that the drafter proposed; return how many were accepted."""
        proposed = verified.round.num_proposed_for(running)
        accepted = min(max(0, len(emitted) - 1), verified.num_from_drafter[running.slot], proposed)
        if verified.round.adaptive:
            self._draft_windows.observe(running, accepted, proposed)
        if self._lookup is not None and proposed:
            self._lookup.observe(running, accepted, proposed)
        return accepted

    def _commit_one(self, running: RunningRequest, emitted: list[int], verified: VerifiedRound) -> None:
        """Commit the tokens of one request. An error here ends this request only."""
        self._metrics.emitted += len(emitted)
        try:
            with nullcontext() if running.grammar_time is None else running.grammar_time.step():
                logprobs = self._logprobs(running, emitted, verified)
                accepted = running.commit(emitted, verified.num_verified[running.slot], logprobs)
                self._count_tokens(running, accepted)
            if not running.finished:
                if not emitted:
                    raise InternalError("the target's logits are not finite at this token; check the engine's dtype")
                running.notify()
                return
        except BaseException as error:
            self.end(running, Finish("error", error))
        else:
            self.end(running, None)

    def _reread_one(self, running: RunningRequest, emitted: list[int]) -> None:
        try:
            running.reread(emitted)
        except BaseException as error:  # ends only this request
            self.end(running, Finish("error", error))

    def _logprobs(self, running: RunningRequest, emitted: list[int], verified: VerifiedRound) -> list[TokenLogprobs]:
        """Return the logprobs of ``emitted``. The host buffer must still hold the masks of the round."""
        logits = verified.logits.get(running.slot)
        if logits is None:
            return []
        rows, words = verified.round.window + 1, self._buffers.words
        request = running.request
        masks = self._buffers.bitmask.host_view(verified.round.batch, rows, words)[running.slot].numpy()
        return token_logprobs(logits.floats(), None if request.scores_prompt else masks, emitted, request.params)

    def _count_tokens(self, running: RunningRequest, accepted: Iterable[int]) -> None:
        """Count tokens that became text, their times, and the ``accepted`` drafts of each of their windows."""
        for each in accepted:
            self._metrics.accept(each)
        count = running.final_length - running.counted_tokens
        running.counted_tokens += count
        self._metrics.kept += count
        if not count:
            return
        now = time.monotonic()
        if running.last_token_time is None:
            running.request.first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - running.request.submitted)
            count -= 1  # other tokens of the first round have no interval of their own
        since = running.last_token_time if running.last_token_time is not None else now
        if count:
            self._metrics.inter_token_seconds.observe((now - since) / count, count)
        running.last_token_time = now

    def _notify_end(self, running: RunningRequest) -> None:
        try:
            running.notify()
        finally:
            self._notify_output(running.request)  # without text, if notifying about the text raises

    def _notify_output(self, request: Request) -> None:
        request.notify(StreamOutput(TextDelta(), [], request.output, index=request.index))

    def _count_end(self, request: Request) -> None:
        reason = request.finish_reason or ""
        self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + 1
        if request.output is None or request.ended is None:
            return
        self._metrics.output_tokens.observe(len(request.output.token_ids))
        self._metrics.request_seconds.observe(request.ended - request.submitted)
        if request.joined is not None and request.first_token_time is not None:
            self._metrics.prefill_seconds.observe(request.first_token_time - request.joined)
            self._metrics.decode_seconds.observe(request.ended - request.first_token_time)
