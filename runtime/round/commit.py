"""What the host does with a round that came back: its tokens become text, requests end, and all of it is counted."""

import time
from collections.abc import Iterable

from tandemrt.engines.errors import InternalError
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.text import Delta
from tandemrt.runtime.requests.waiting import Dropped
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.round import Verified


class Committer:
    """Takes requests forward and out of their slots. Slots and counts are in order whenever a request is told."""

    def __init__(self, buffers: RoundBuffers, slots: Slots, metrics: Metrics) -> None:
        self._buffers = buffers
        self._slots = slots
        self._metrics = metrics

    def commit(self, verified: Verified) -> None:
        """What the round emitted becomes text. Its tokens must have reached the host."""
        batch, window = verified.round.batch, verified.round.window
        tokens = self._buffers.tokens.host_view(batch, window + 1).tolist()
        counts = self._buffers.count.host_view(batch).tolist()
        for slot, running in verified.round.rows.items():
            if running.finished:  # cancelled since
                continue
            emitted = tokens[slot][: counts[slot]]
            try:
                accepted = running.commit(emitted, verified.usable[slot])
            except Exception as error:
                self.end(running, "error", failure=error)
                continue
            self._metrics.emitted += len(emitted)
            self._keep(running, accepted)
            if running.request.output is not None:
                self._leave(running)
            elif not emitted:
                rule = "the target's logits are not finite at this token; check the engine's dtype"
                self.end(running, "error", failure=InternalError(rule))
            else:
                running.tell()

    def end(self, running: Running, reason: str, failure: Exception | None = None) -> None:
        """End a request from outside of its text and free its slot."""
        self._keep(running, running.finish(reason, failure))
        self._leave(running)

    def drop(self, dropped: Dropped) -> None:
        """End a request that has left the queue and has no slot."""
        request = dropped.request
        request.end(dropped.reason, failure=dropped.failure)
        self._count(request)
        request.tell(StreamOutput(Delta(), [], request.output))

    def _leave(self, running: Running) -> None:
        """The way out of a slot for everybody who has finished: whatever raises, it is counted and told."""
        try:
            self._slots.leave(running.slot)
        finally:
            self._count(running.request)
            self._metrics.forced_ends += running.forced_ends
            self._metrics.boundaries_inside += running.boundaries_inside
            running.tell()

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
        for _ in range(count):
            self._metrics.inter_token_seconds.observe((now - since) / count)
        running.newest = now

    def _count(self, request: Request) -> None:
        reason = request.finish_reason or ""
        self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + 1
