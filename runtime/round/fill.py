"""What the host gives verification: masks, draft lengths and adjusted tokens of a round, on their way to the device."""

import time
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from tandemrt.plugins.operators import Rule
from tandemrt.runtime.constraints.constraint import Filled
from tandemrt.runtime.constraints.masks import NOTHING, MaskRows
from tandemrt.runtime.device import Clock
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.beside import beside
from tandemrt.runtime.round.buffers import RoundBuffers, write_drafts
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.synthetic import accept

SLOW_S = 0.002  # that the masks of a request took last: its next ones are worked out beside those of others


class Window(NamedTuple):
    """What is to be verified of a request: ``tokens``, of which the first ``kept`` are what was drafted.

    ``forced``: which of them, by index, follow from the constraint, see Constraint.fill.
    """

    tokens: list[int]
    kept: int
    forced: list[int]


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
        assert buffers.draft_len.host is not None
        self._lengths = buffers.draft_len.host.numpy()
        self._masks = MaskRows(buffers.bitmask.host.numpy().reshape(-1, buffers.words))

    def fill(self, this: Round) -> dict[int, Window]:
        """Fill for the requests of ``this`` round; the other slots of [0, batch) emit nothing.

        Returns what is to be verified, per slot; the drafts on the device follow what is forced in it. A request that
        fails here ends and is left out.
        """
        rows, batch, window = this.rows, this.batch, this.window
        entries = self._buffers.entries
        drafts = self._buffers.draft_tokens.host_view(batch, window).tolist()
        windows: dict[int, Window] = {}
        entries.begin(batch)
        slow = {
            slot: partial(self._write_masks, running, drafts[slot], this)
            for slot, running in sorted(rows.items())
            if running.share is not None and running.share.filled_s > SLOW_S
        }
        begun = beside(slow) if slow else {}
        for slot in range(batch):
            if slot in rows:
                try:
                    filled = begun[slot]() if slot in begun else self._write_masks(rows[slot], drafts[slot], this)
                    windows[slot] = self._fill_one(rows[slot], *filled, this)
                    continue
                except BaseException as error:  # it is this request's, whatever it is
                    self._committer.end(rows[slot], "error", failure=error)
            self._masks.share(slot * (window + 1), NOTHING, window + 1)
        self._lengths[:batch] = [len(windows[slot].tokens) if slot in windows else 0 for slot in range(batch)]
        entries.write()
        if any(each.kept < len(each.tokens) for each in windows.values()):
            verified = {slot: each.tokens for slot, each in windows.items()}
            write_drafts(self._buffers.draft_tokens, batch, window, verified)
        self._send(batch)
        return windows

    def _write_masks(self, running: Running, drafted: list[int], this: Round) -> tuple[list[int], Filled]:
        """Write the masks of one request, maybe beside those of others; the draft that they were asked for, too."""
        most, first = this.most(running), running.slot * (this.window + 1)
        known = most if self._reach is None else max(0, self._reach + 1 - len(running.tokens))
        if running.slot in this.late and not this.covered:
            known = 0
        draft = drafted[: min(most, known)]
        if -1 in draft:
            draft = draft[: draft.index(-1)]
        overrule = running.request.rule is Rule.REJECTION and not this.covered
        with nullcontext() if running.share is None else running.share.step():
            filled = running.constraint.fill(
                draft, self._masks, first, most=most if this.forces else 0, overrule=overrule
            )
        if running.share is not None:
            running.share.filled_s = running.share.newest
        return draft, filled

    def _fill_one(self, running: Running, draft: list[int], filled: Filled, this: Round) -> Window:
        """Note what was filled of one request, and write its adjusted tokens; what is to be verified."""
        request, first = running.request, running.slot * (this.window + 1)
        rejection = request.rule is Rule.REJECTION
        if running.share is not None:
            self._metrics.fill_seconds.observe(running.share.filled_s)
        tokens = filled.tokens
        kept = _same(tokens, draft)
        if request.trace is not None:
            allowed = [self._masks.allowed(first + row) for row in range(len(tokens) + 1)]
            request.trace.fill(time.perf_counter(), draft if kept == len(tokens) else tokens, len(tokens), allowed)
        if request.synthetic is not None:
            self._metrics.synthetic_drafts += accept(request.synthetic, running, tokens, self._masks, first)
        # The rejection rule must meet the refused token itself: stopping short of it, because of what it is,
        # would draw from the target where the rule draws from the residual.
        if rejection and kept == len(tokens):
            tokens = draft[: kept + 1]
            kept = len(tokens)
        if running.penalties is not None:
            self._buffers.entries.add(running.slot, running.penalties, running.penalties.listed(running.tokens, tokens))
        proposed = max(len(draft), len(tokens))
        self._metrics.drafted += proposed
        self._metrics.evaluated += len(tokens)
        self._metrics.cut_drafts += proposed - len(tokens)
        self._metrics.forced_drafts += len(tokens) - (0 if this.covered else kept)
        return Window(tokens, kept, filled.forced)

    def _send(self, batch: int) -> None:
        with self._clock.copies(behind=False):
            self._buffers.entries.copy_in()
            words = self._buffers.words
            self._buffers.bitmask.copy_part_in(self._masks.changed_from * words, self._masks.changed * words)
            self._buffers.draft_len.copy_in(batch)
        self._masks.settle()


def _same(tokens: list[int], draft: list[int]) -> int:
    """How many of ``tokens`` are the first ones of ``draft``."""
    if tokens == draft[: len(tokens)]:
        return len(tokens)
    return next(at for at, token in enumerate(tokens) if [token] != draft[at : at + 1])
