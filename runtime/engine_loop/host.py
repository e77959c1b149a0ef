"""The host's part of a round: write the inputs of verification, and commit its result to the texts."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import NamedTuple

from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.constraints.constraint import FilledRows
from tandemrt.runtime.constraints.rows import NO_TOKENS, MaskRows
from tandemrt.runtime.device.buffers import RoundBuffers, write_drafts
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.engine_loop.models import Lookup
from tandemrt.runtime.engine_loop.planner import DraftWindowPlanner
from tandemrt.runtime.engine_loop.synthetic import accept_synthetic
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.logprobs import TokenLogprobs, token_logprobs
from tandemrt.runtime.requests.request import Finish, Request, StreamOutput
from tandemrt.runtime.requests.running import DroppedRequest, RunningRequest
from tandemrt.runtime.requests.slots import PendingValidations, Round, Slots, VerifiedRound
from tandemrt.runtime.requests.text import TextDelta
from tandemrt.runtime.workers.parallel import ParallelWork

log = logging.getLogger(__name__)

SLOW_S = 0.002  # if the masks of a request took longer, its next ones are written in parallel with others


class DraftToVerify(NamedTuple):
    """The drafted tokens of a request that the target verifies.

    Attributes:
        tokens: token ids; the first ``num_from_drafter`` come from the drafter.
        fast_forward: indices of fast-forward tokens, see Constraint.fill_rows.
    """

    tokens: list[int]
    num_from_drafter: int
    fast_forward: list[int]


class VerifyInputWriter:
    """Writes the host copies of ``buffers`` and enqueues their uploads. The drafts must be on the host.

    The drafter's drafts beyond its ``max_length`` are not verified. ``end`` ends a request with an error.
    """

    def __init__(
        self,
        buffers: RoundBuffers,
        streams: Streams,
        end: Callable[[RunningRequest, Finish], None],
        metrics: Metrics,
        max_length: int | None = None,
    ) -> None:
        self._buffers = buffers
        self._max_length = max_length
        self._streams = streams
        self._end = end
        self._metrics = metrics
        self._parallel = ParallelWork()
        assert buffers.bitmask.host is not None
        assert buffers.draft_len.host is not None
        self._lengths = buffers.draft_len.host.numpy()
        self._masks = MaskRows(buffers.bitmask.host.numpy().reshape(-1, buffers.words))

    def write(self, round_: Round) -> dict[int, DraftToVerify]:
        """Write the inputs of all requests of the round; other slots of [0, batch) get empty masks.

        Returns the drafts to verify, by slot. Fast-forward tokens that replace drafts are uploaded. A request that
        fails here ends with an error.
        """
        rows, batch, window = round_.rows, round_.batch, round_.window
        entries = self._buffers.entries
        proposed = self._buffers.draft_tokens.host_view(batch, window).tolist()
        drafts: dict[int, DraftToVerify] = {}
        entries.begin(batch)
        slow = {
            slot: partial(self._write_masks, running, proposed[slot], round_)
            for slot, running in sorted(rows.items())
            if running.grammar_time is not None and running.grammar_time.last_fill_s > SLOW_S
        }
        started = self._parallel.start(slow) if slow else {}
        for slot in range(batch):
            if slot in rows:
                try:
                    filled = (
                        started[slot]() if slot in started else self._write_masks(rows[slot], proposed[slot], round_)
                    )
                    drafts[slot] = self._write_one(rows[slot], *filled, round_)
                    continue
                except BaseException as error:  # ends only this request
                    self._end(rows[slot], Finish("error", error))
            self._masks.write_shared(slot * (window + 1), NO_TOKENS, window + 1)
        self._lengths[:batch] = [len(drafts[slot].tokens) if slot in drafts else 0 for slot in range(batch)]
        entries.write()
        if any(each.num_from_drafter < len(each.tokens) for each in drafts.values()):
            write_drafts(
                self._buffers.draft_tokens, batch, window, {slot: each.tokens for slot, each in drafts.items()}
            )
        self._upload(batch)
        return drafts

    def close(self) -> None:
        """End the threads that write masks."""
        self._parallel.close()

    def _write_masks(self, running: RunningRequest, proposed: list[int], round_: Round) -> tuple[list[int], FilledRows]:
        """Write the masks of one request; return its valid drafts and the result of fill_rows. Thread-safe."""
        most, first = round_.max_drafted(running), running.slot * (round_.window + 1)
        draft = proposed[: min(most, self._valid(running, most, round_))]
        if -1 in draft:
            draft = draft[: draft.index(-1)]
        overrule = running.request.rule is Rule.REJECTION and not round_.only_fast_forward
        with nullcontext() if running.grammar_time is None else running.grammar_time.step():
            limit = most if running.slot in round_.may_fast_forward else 0
            filled = running.fill_rows(draft, self._masks, first, limit=limit, override=overrule)
        if running.grammar_time is not None:
            running.grammar_time.last_fill_s = running.grammar_time.last_step_s
        return draft, filled

    def _valid(self, running: RunningRequest, most: int, round_: Round) -> int:
        """Return how many of up to ``most`` proposed tokens may be verified."""
        if running.slot in round_.copied:
            return most
        if running.slot in round_.undrafted and not round_.only_fast_forward:
            return 0
        return most if self._max_length is None else max(0, self._max_length + 1 - len(running.tokens))

    def _write_one(self, running: RunningRequest, draft: list[int], filled: FilledRows, round_: Round) -> DraftToVerify:
        """Write the bias and penalty entries of one request, after its masks, and count its drafts."""
        request, first = running.request, running.slot * (round_.window + 1)
        if running.grammar_time is not None:
            self._metrics.fill_seconds.observe(running.grammar_time.last_fill_s)
        tokens = filled.tokens
        if running.replay.rereading:
            return DraftToVerify(tokens, 0, filled.fast_forward)
        kept = _common_prefix(tokens, draft)
        if request.trace is not None:
            allowed = [self._masks.count_allowed(first + row) for row in range(len(tokens) + 1)]
            request.trace.record_fill(
                time.perf_counter(), draft if kept == len(tokens) else tokens, len(tokens), allowed
            )
        if request.synthetic is not None:
            self._metrics.synthetic_drafts += accept_synthetic(request.synthetic, running, tokens, self._masks, first)
        # The rejection rule must also verify the first token that the constraint rejects. If the window ended before
        # it, the next token would be sampled from the target instead of from the residual distribution.
        if request.rule is Rule.REJECTION and kept == len(tokens):
            tokens = draft[: kept + 1]
            kept = len(tokens)
        if running.penalties is not None:
            self._buffers.entries.add(running.slot, running.penalties.entries(running.tokens, tokens))
        proposed = max(len(draft), len(tokens))
        self._metrics.drafted += proposed
        self._metrics.evaluated += len(tokens)
        self._metrics.constraint_rejected_drafts += proposed - len(tokens)
        self._metrics.fast_forward_drafts += len(tokens) - (0 if round_.only_fast_forward else kept)
        return DraftToVerify(tokens, kept, filled.fast_forward)

    def _upload(self, batch: int) -> None:
        with self._streams.copies(after_work=False):
            self._buffers.entries.copy_in()
            words = self._buffers.words
            self._buffers.bitmask.copy_part_in(self._masks.first_changed * words, self._masks.changed_end * words)
            self._buffers.draft_len.copy_in(batch)
        self._masks.mark_clean()


def _common_prefix(tokens: list[int], draft: list[int]) -> int:
    """Return the length of the common prefix of ``tokens`` and ``draft``."""
    if tokens == draft[: len(tokens)]:
        return len(tokens)
    return next(at for at, token in enumerate(tokens) if [token] != draft[at : at + 1])


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
        """``lookup``: the one beside a draft model."""
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
        for slot, running in round_.rows.items():
            if not running.finished:  # cancelled since
                emitted = tokens[slot][: counts[slot]]
                if running.replay.rereading:
                    self._reread_one(running, emitted)
                    continue
                if slot in verified.num_from_drafter:
                    self._observe_acceptance(running, emitted, verified)
                self._commit_one(running, emitted, verified)

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

    def _observe_acceptance(self, running: RunningRequest, emitted: list[int], verified: VerifiedRound) -> None:
        proposed = verified.round.num_proposed_for(running)
        accepted = min(max(0, len(emitted) - 1), verified.num_from_drafter[running.slot], proposed)
        if verified.round.adaptive:
            self._draft_windows.observe(running, accepted, proposed)
        if self._lookup is not None and proposed:
            self._lookup.observe(running, accepted, proposed)

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
