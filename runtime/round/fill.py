"""What the host gives verification: masks, draft lengths and adjusted tokens of a round, on their way to the device."""

import time

from tandemrt.plugins.operators import Rule
from tandemrt.runtime.constraints.masks import NOTHING, MaskRows
from tandemrt.runtime.device import Clock
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.round import Round


class Filler:
    """Fills the host twins of ``buffers`` and enqueues their copies. The drafts must have reached the host.

    What was drafted behind the drafter's ``reach`` is not verified.
    """

    def __init__(
        self, buffers: RoundBuffers, clock: Clock, committer: Committer, metrics: Metrics, reach: int | None = None
    ) -> None:
        self._buffers = buffers
        self._reach = reach
        self._clock = clock
        self._committer = committer
        self._metrics = metrics
        assert buffers.bitmask.host is not None
        self._masks = MaskRows(buffers.bitmask.host.numpy().reshape(-1, buffers.words))

    def fill(self, this: Round) -> dict[int, int]:
        """Fill for the requests of ``this`` round; the other slots of [0, batch) emit nothing.

        Returns how many drafted tokens are to be verified, per slot. A request that fails here ends and is left out.
        """
        rows, batch, window = this.rows, this.batch, this.window
        entries = self._buffers.entries
        drafts = self._buffers.draft_tokens.host_view(batch, window).tolist()
        lengths = self._buffers.draft_len.host_view(batch)
        lengths.zero_()
        usable = {}
        entries.begin(batch)
        for slot in range(batch):
            first = slot * (window + 1)
            if slot in rows:
                try:
                    lengths[slot] = usable[slot] = self._fill_one(rows[slot], drafts[slot], first)
                    continue
                except BaseException as error:  # it is this request's, whatever it is
                    self._committer.end(rows[slot], "error", failure=error)
            for row in range(first, first + window + 1):
                self._masks.share(row, NOTHING)
        entries.write()
        self._send(batch)
        return usable

    def _fill_one(self, running: Running, drafted: list[int], first: int) -> int:
        """Write masks from row ``first`` on and adjusted tokens; how many drafted tokens are to be verified."""
        request = running.request
        known = request.window if self._reach is None else max(0, self._reach + 1 - len(running.tokens))
        draft = drafted[: min(request.window, running.remaining - 1, known)]
        if -1 in draft:
            draft = draft[: draft.index(-1)]
        if running.share is None:
            count = running.constraint.fill(draft, self._masks, first)
        else:
            with running.share.step():
                count = running.constraint.fill(draft, self._masks, first)
            self._metrics.fill_seconds.observe(running.share.newest)
        if request.trace is not None:
            allowed = [self._masks.allowed(first + row) for row in range(count + 1)]
            request.trace.fill(time.perf_counter(), draft, count, allowed)
        # The rejection rule must meet the refused token itself: stopping short of it, because of what it is,
        # would draw from the target where the rule draws from the residual.
        if request.rule is Rule.REJECTION:
            count = min(count + 1, len(draft))
        if running.penalties is not None:
            listed = running.penalties.listed(running.tokens, draft[:count])
            self._buffers.entries.add(running.slot, running.penalties, listed)
        self._metrics.drafted += len(draft)
        self._metrics.evaluated += count
        self._metrics.cut_drafts += len(draft) - count
        return count

    def _send(self, batch: int) -> None:
        with self._clock.copies(behind=False):
            self._buffers.entries.copy_in()
            words = self._buffers.words
            self._buffers.bitmask.copy_part_in(self._masks.changed_from * words, self._masks.changed * words)
            self._buffers.draft_len.copy_in(batch)
        self._masks.settle()
