"""What the host does with a round that came back: its tokens become text, requests end, and all of it is counted."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext

from tandemrt.engines.errors import InternalError
from tandemrt.plugins.tensors import host_floats
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.checks import Checks
from tandemrt.runtime.requests.logprobs import TokenLogprobs, token_logprobs
from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.text import Delta
from tandemrt.runtime.requests.waiting import Dropped
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.round import Verified

log = logging.getLogger(__name__)


class Committer:
    """Takes requests forward and out of their slots. Slots and counts are in order whenever a request is told."""

    def __init__(self, buffers: RoundBuffers, slots: Slots, checks: Checks, metrics: Metrics) -> None:
        self._buffers = buffers
        self._slots = slots
        self._checks = checks
        self._metrics = metrics

    def commit(self, verified: Verified) -> None:
        """What the round emitted becomes text. Its tokens must have reached the host."""
        batch, window = verified.round.batch, verified.round.window
        tokens = self._buffers.tokens.host_view(batch, window + 1).tolist()
        counts = self._buffers.count.host_view(batch).tolist()
        for slot, running in verified.round.rows.items():
            if not running.finished:  # cancelled since
                emitted = tokens[slot][: counts[slot]]
                if verified.round.adapts:
                    asked = verified.round.drafts_for(running)
                    running.acceptance.note(min(max(0, len(emitted) - 1), verified.kept[slot], asked), asked)
                self._take(running, emitted, verified)

    def end(self, running: Running, reason: str, failure: BaseException | None = None) -> None:
        """End a request and free its slot, whatever raises on the way: the one way out of a slot. Raises nothing.

        One whose text has finished keeps its end. What can still raise then (a slot that cannot be emptied) is logged:
        it takes nothing from a finished text, and nothing from those in the other slots.

        Without a ``reason`` its text has finished by itself. If that is to be checked, the request is told of its end
        by ``settle``, when the verdict has come, and holds no slot until then.
        """
        self._end(running, reason, failure, lambda: self._slots.leave(running.slot))

    def drop(self, dropped: Dropped) -> None:
        """End a request that has left the queue and has no slot; one that had one keeps its text. Raises nothing."""
        waiting, reason, failure = dropped
        if waiting.preempted is not None:
            self._end(waiting.preempted, reason, failure, lambda: None)
            return
        request = waiting.request
        request.end(reason, failure=failure)
        self._count(request)
        self._tell(request)

    def _end(self, running: Running, reason: str, failure: BaseException | None, leave: Callable[[], None]) -> None:
        request = running.request
        checked = not reason and running.verdict is not None
        try:
            with ExitStack() as always:  # who is added last comes first; each comes, whatever the others raise
                if not checked:
                    always.callback(self._last_words, running)
                    always.callback(self._count, request)
                always.callback(leave)
                if checked:
                    always.callback(running.tell)
                    always.callback(self._checks.add, running)
                else:
                    self._keep(running, running.finish(reason, failure))
                self._metrics.forced_ends += running.forced_ends
                self._metrics.boundaries_inside += running.boundaries_inside
        except BaseException:
            log.exception("a request ended (%s), and something failed with its end", request.finish_reason)

    def settle(self, running: Running, reason: str | None, failure: BaseException | None = None) -> None:
        """End a request whose text was checked, or that ends for ``reason`` before it is. Raises nothing."""
        request = running.request
        try:
            with ExitStack() as always:
                always.callback(self._last_words, running)
                always.callback(self._count, request)
                if reason is None:
                    running.judge()
                else:
                    running.finish(reason, failure)
        except BaseException:
            log.exception("a checked request ended (%s), and something failed with its end", request.finish_reason)

    def _logprobs(self, running: Running, emitted: list[int], verified: Verified) -> list[TokenLogprobs]:
        """Of ``emitted``, by masks that the next round has not filled yet."""
        logits = verified.logits.get(running.slot)
        if logits is None:
            return []
        rows, words = verified.round.window + 1, self._buffers.words
        request = running.request
        masks = self._buffers.bitmask.host_view(verified.round.batch, rows, words)[running.slot].numpy()
        return token_logprobs(host_floats(logits), None if request.scores else masks, emitted, request.params)

    def _take(self, running: Running, emitted: list[int], verified: Verified) -> None:
        """Take one request forward. What raises here is its own, and ends it alone."""
        self._metrics.emitted += len(emitted)
        try:
            with nullcontext() if running.share is None else running.share.step():
                logprobs = self._logprobs(running, emitted, verified)
                self._keep(running, running.commit(emitted, verified.usable[running.slot], logprobs))
            if not running.finished:
                if not emitted:
                    raise InternalError("the target's logits are not finite at this token; check the engine's dtype")
                running.tell()
                return
        except BaseException as error:
            self.end(running, "error", error)
        else:
            self.end(running, "")

    def _keep(self, running: Running, accepted: Iterable[int]) -> None:
        """Count tokens that became text, how long they took, and what was ``accepted`` of each of their windows."""
        for each in accepted:
            self._metrics.accept(each)
        count = running.certain - running.counted
        running.counted += count
        self._metrics.kept += count
        if not count:
            return
        now = time.monotonic()
        if running.newest is None:
            self._metrics.time_to_first_token_seconds.observe(now - running.request.submitted)
            count -= 1  # the others of a first window come with it, at no time of their own
        since = running.newest if running.newest is not None else now
        if count:
            self._metrics.inter_token_seconds.observe((now - since) / count, count)
        running.newest = now

    def _last_words(self, running: Running) -> None:
        try:
            running.tell()
        finally:
            self._tell(running.request)  # without a text, where that is what raises

    def _tell(self, request: Request) -> None:
        request.tell(StreamOutput(Delta(), [], request.output, index=request.index))

    def _count(self, request: Request) -> None:
        reason = request.finish_reason or ""
        self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + 1
