"""What the host does with a round that came back: its tokens become text, requests end, and all of it is counted."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandemrt.engines.errors import InternalError
from tandemrt.runtime.caches.kv_cache import Room
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.slots import SlotState


@dataclass(frozen=True)
class Round:
    """A round on the device: which request each live slot served, and the shape of its calls."""

    rows: Mapping[int, Request]
    batch: int
    window: int
    usable: Mapping[int, int]  # drafted tokens that were verified, per slot


class Books:
    """Takes requests forward and out of their slots. They are in order whenever a request is told of something."""

    def __init__(
        self, buffers: RoundBuffers, state: SlotState, scheduler: Scheduler, room: Room, metrics: Metrics
    ) -> None:
        self._buffers = buffers
        self._state = state
        self._scheduler = scheduler
        self._room = room
        self._metrics = metrics

    def commit(self, last: Round) -> None:
        """What ``last`` emitted becomes text. Its tokens must have reached the host."""
        tokens = self._buffers.tokens.host_view(last.batch, last.window + 1).tolist()
        counts = self._buffers.count.host_view(last.batch).tolist()
        for slot, request in last.rows.items():
            if request.finished:  # cancelled since
                continue
            emitted = tokens[slot][: counts[slot]]
            before = request.certain
            try:
                accepted = request.commit(emitted, last.usable[slot])
                if not emitted and not request.finished:
                    raise InternalError("the target's logits are not finite at this token; check the engine's dtype")
            except Exception as error:
                self.end(slot, request, "error", failure=error)
                continue
            self._metrics.emitted += len(emitted)
            self._keep(request, request.certain - before, accepted)
            if request.output is not None:
                self._vacate(slot)
                self._count(request)
            request.tell()

    def end(self, slot: int, request: Request, reason: str, failure: Exception | None = None) -> None:
        """End a request from outside of its text and free its slot."""
        before = request.certain
        accepted = request.finish(reason, failure)
        self._keep(request, request.certain - before, accepted)
        try:
            self._vacate(slot)
        finally:
            self.close(request)

    def close(self, request: Request) -> None:
        """Count a request that has finished and has no slot, and let its listener know."""
        self._count(request)
        request.tell()

    def _vacate(self, slot: int) -> None:
        self._scheduler.free(slot)
        self._room.release(slot)
        self._state.vacate(slot)

    def _keep(self, request: Request, count: int, accepted: Iterable[int]) -> None:
        """Count tokens that became text, how long they took, and what was ``accepted`` of each of their windows."""
        for each in accepted:
            self._metrics.accept(each)
        self._metrics.kept += count
        if not count:
            return
        now = time.monotonic()
        if request.newest is None:
            self._metrics.time_to_first_token_seconds.observe(now - request.submitted)
            count -= 1  # the others of a first window come with it, at no time of their own
        since = request.newest if request.newest is not None else now
        for _ in range(count):
            self._metrics.inter_token_seconds.observe((now - since) / count)
        request.newest = now

    def _count(self, request: Request) -> None:
        reason = request.finish_reason or ""
        self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + 1
        self._metrics.forced_ends += request.forced_ends
        self._metrics.boundaries_inside += request.boundaries_inside
