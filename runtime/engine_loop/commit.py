"""Commit rounds: append their tokens to the texts, end requests, notify listeners.

``commit`` does what later rounds depend on; the device may wait for it. ``deliver`` does the rest while the device is
busy: texts, counts and listeners of the rows that only lengthen their texts.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack, nullcontext

import numpy as np

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.drafter import Lookup
from tandemrt.runtime.engine_loop.steady_rows import Ints, SteadyRows
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.logprobs import TokenLogprobs, token_logprobs
from tandemrt.runtime.requests.request import Finish, Request, StreamOutput
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import DroppedRequest, RunningRequest
from tandemrt.runtime.requests.slots import PendingValidations, Slots
from tandemrt.runtime.requests.text import TextDelta

log = logging.getLogger(__name__)

_REPLACED = -1  # in place of a number of accepted drafts, where others replaced those of the drafter


class Committer:
    """Commits rounds and ends requests. Listeners are notified after slots and metrics are updated.

    Rows of ``steady`` are committed at once, the others one by one.
    """

    def __init__(
        self,
        buffers: RoundBuffers,
        slots: Slots,
        steady: SteadyRows,
        validations: PendingValidations,
        draft_windows: DraftWindowPlanner,
        metrics: Metrics,
        lookup: Lookup | None = None,
    ) -> None:
        """``lookup``: learns which of its copies are accepted, where a drafter could draft instead."""
        self._buffers = buffers
        self._slots = slots
        self._steady = steady
        # Requests whose texts a round has lengthened, with the numbers of their accepted and proposed drafts.
        self._undelivered: list[tuple[RunningRequest, int, int]] = []
        self._committed = 0.0  # when the round of these was committed, in seconds of ``time.monotonic``
        self._adaptive = False  # Round.adaptive of that round
        self._lookup = lookup
        self._validations = validations
        self._draft_windows = draft_windows
        self._metrics = metrics

    def commit(self, verified: VerifiedRound) -> None:
        """Append the emitted tokens of a round, which must be on the host, to the texts."""
        self.deliver()
        round_ = verified.round
        tokens = self._buffers.tokens.host_view(round_.batch, round_.window + 1).numpy()
        counts = self._buffers.count.host_view(round_.batch).numpy()
        window = round_.num_proposed if round_.needs_drafter else 0
        lengthened = self._lengthen(verified, tokens, counts, window)
        num_accepted = sum(max(0, accepted) for _, accepted, _ in self._undelivered)
        if len(lengthened) < len(round_.rows):
            num_accepted += self._commit_alone(verified, tokens, counts, lengthened)
        if round_.adaptive and round_.rows and not round_.copied:
            accepted = num_accepted / len(round_.rows)
            self._draft_windows.observe_round(round_.batch, window, accepted, missed=round_.missed)

    def deliver(self) -> None:
        """Pass what ``commit`` has appended to texts, counts and listeners. Call while the device is busy."""
        undelivered, self._undelivered = self._undelivered, []
        windows: Counter[int] = Counter()  # by accepted drafts
        times: Counter[tuple[float, int]] = Counter()  # of rows, by the time of their last token and new tokens
        for running, accepted, proposed in undelivered:
            if running.finished:  # cancelled since: its end has delivered all of it
                continue
            try:
                if self._adaptive and accepted != _REPLACED:
                    self._draft_windows.observe(running, accepted, proposed)
                windows.update(running.take_accepted())
                since, count = running.count_tokens(self._committed)
                times[since or self._committed, count] += 1  # a steady text has a token before
                running.notify()
            except BaseException as error:  # ends only this request
                self.end(running, Finish("error", error))
        for accepted, number in windows.items():
            self._metrics.accept(accepted, number)
        for (since, count), rows in times.items():
            self._metrics.kept += rows * count
            self._metrics.inter_token_seconds.observe((self._committed - since) / count, rows * count)

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
                    accepted = () if finish is None else running.finish(finish)
                    self._count_tokens(running, accepted, time.monotonic())
                self._metrics.forced_ends += running.forced_ends
                self._metrics.reasoning_ends_mid_round += running.reasoning_ends_mid_round
        except BaseException:
            log.exception("a request ended (%s), but an error occurred meanwhile", request.finish_reason)

    def _lengthen(self, verified: VerifiedRound, tokens: Ints, counts: Ints, window: int) -> set[int]:
        """Commit the rows that only lengthen their texts, up to what ``deliver`` does; return their slots.

        ``window``: tokens per row that the drafter proposed.
        """
        round_, steady = verified.round, self._steady
        at = steady.lengthened(round_, tokens, counts)
        slots, emitted = at.tolist(), counts[at]
        # A row whose prompt has just ended (Round.undrafted) is not steady yet.
        most = np.minimum(steady.most_drafts(round_, at), window)
        from_drafter = np.array([verified.num_from_drafter.get(slot, _REPLACED) for slot in slots], np.int64)
        accepted = np.minimum(np.minimum(emitted - 1, most), from_drafter).tolist()
        steady.append(at, emitted)
        for slot, decided, count in zip(slots, tokens[at].tolist(), emitted.tolist(), strict=True):
            round_.rows[slot].lengthen(decided[:count], verified.num_verified[slot])
        rows = [round_.rows[slot] for slot in slots]
        self._undelivered = list(zip(rows, accepted, most.tolist(), strict=True))
        self._committed, self._adaptive = time.monotonic(), round_.adaptive
        self._metrics.emitted += int(emitted.sum())
        if self._lookup is not None:
            for each in self._undelivered:
                self._observe_lookup(*each)
        return set(slots)

    def _commit_alone(self, verified: VerifiedRound, tokens: Ints, counts: Ints, lengthened: Container[int]) -> int:
        """Commit the other rows one by one; return how many tokens of the drafter were accepted."""
        num_accepted = 0
        for slot, running in verified.round.rows.items():
            if slot in lengthened or running.finished:  # cancelled since
                continue
            emitted = tokens[slot, : counts[slot]].tolist()
            if running.replay.rereading:
                self._reread_one(running, emitted)
                continue
            if slot in verified.num_from_drafter:
                proposed = verified.round.num_proposed_for(running)
                accepted = min(max(0, len(emitted) - 1), verified.num_from_drafter[slot], proposed)
                num_accepted += accepted
                if verified.round.adaptive:
                    self._draft_windows.observe(running, accepted, proposed)
                self._observe_lookup(running, accepted, proposed)
            self._metrics.emitted += len(emitted)
            self._commit_one(running, emitted, verified)
        return num_accepted

    def _observe_lookup(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count accepted drafts for the lookup: at once, because a text may depend on it under the rejection rule."""
        if self._lookup is not None and proposed and accepted != _REPLACED:
            self._lookup.observe(running, accepted, proposed)

    def _commit_one(self, running: RunningRequest, emitted: list[int], verified: VerifiedRound) -> None:
        """Commit the tokens of one request. An error here ends this request only."""
        try:
            with nullcontext() if running.grammar_time is None else running.grammar_time.step():
                logprobs = self._logprobs(running, emitted, verified)
                accepted = running.commit(emitted, verified.num_verified[running.slot], logprobs)
                self._count_tokens(running, accepted, time.monotonic())
            if not running.finished:
                if not emitted:
                    raise InternalError("the target's logits are not finite at this token; check the engine's dtype")
                self._steady.watch(running)
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

    def _count_tokens(self, running: RunningRequest, accepted: Iterable[int], now: float) -> None:
        """Count tokens that became text at ``now``, and the ``accepted`` drafts of each of their windows."""
        for each in accepted:
            self._metrics.accept(each)
        since, count = running.count_tokens(now)
        self._metrics.kept += count
        if not count:
            return
        if since is None:
            running.request.first_token_time = since = now
            self._metrics.time_to_first_token_seconds.observe(now - running.request.submitted)
            count -= 1  # other tokens of the first round have no interval of their own
        if count:
            self._metrics.inter_token_seconds.observe((now - since) / count, count)

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
