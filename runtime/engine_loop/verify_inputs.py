"""The inputs of verification that the host writes: drafts, masks, biases and penalties of each request."""

import time
from collections.abc import Callable, Container
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np

from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.constraints.constraint import FilledRows
from tandemrt.runtime.constraints.rows import NO_TOKENS, MaskRows
from tandemrt.runtime.device.buffers import RoundBuffers, write_drafts
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.engine_loop.steady_rows import Ints, SteadyRows
from tandemrt.runtime.engine_loop.synthetic import accept_synthetic
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.workers.parallel import ParallelWork

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


class DraftsToVerify(NamedTuple):
    """The drafts that a round verifies.

    Attributes:
        lengths: number of drafted tokens by slot, for all rows of the round that are left.
        from_drafter: how many of these the drafter proposed.
        alone: rows that were handled one by one. All others verify the drafter's tokens only.
    """

    lengths: dict[int, int]
    from_drafter: dict[int, int]
    alone: dict[int, DraftToVerify]


class VerifyInputWriter:
    """Writes the host copies of ``buffers`` and enqueues their uploads. The drafts must be on the host.

    The drafter's drafts beyond its ``max_length`` are not verified. ``end`` ends a request with an error. Rows of
    ``steady`` are written at once, the others one by one.
    """

    def __init__(
        self,
        buffers: RoundBuffers,
        streams: Streams,
        steady: SteadyRows,
        end: Callable[[RunningRequest, Finish], None],
        metrics: Metrics,
        max_length: int | None = None,
    ) -> None:
        self._buffers = buffers
        self._max_length = max_length
        self._streams = streams
        self._steady = steady
        self._end = end
        self._metrics = metrics
        self._parallel = ParallelWork()
        assert buffers.bitmask.host is not None
        assert buffers.draft_len.host is not None
        self._lengths = buffers.draft_len.host.numpy()
        self._masks = MaskRows(buffers.bitmask.host.numpy().reshape(-1, buffers.words))

    def write(self, round_: Round) -> DraftsToVerify:
        """Write the inputs of all requests of the round; other slots of [0, batch) get empty masks.

        Fast-forward tokens that replace drafts are uploaded. A request that fails here ends with an error.
        """
        batch, window, entries = round_.batch, round_.window, self._buffers.entries
        proposed = self._buffers.draft_tokens.host_view(batch, window).numpy()
        entries.begin(batch)
        lengths = self._write_steady(round_, proposed)
        from_drafter = dict(lengths)
        alone = self._write_alone(round_, proposed, lengths) if len(lengths) < batch else {}
        for slot, draft in alone.items():
            lengths[slot], from_drafter[slot] = len(draft.tokens), draft.num_from_drafter
        self._lengths[:batch] = 0
        self._lengths[list(lengths)] = list(lengths.values())
        entries.write()
        if any(each.num_from_drafter < len(each.tokens) for each in alone.values()):
            tokens = {slot: proposed[slot, :length].tolist() for slot, length in lengths.items()}
            tokens |= {slot: draft.tokens for slot, draft in alone.items()}
            write_drafts(self._buffers.draft_tokens, batch, window, tokens)
        self._upload(batch)
        return DraftsToVerify(lengths, from_drafter, alone)

    def close(self) -> None:
        """End the threads that write masks."""
        self._parallel.close()

    def _write_steady(self, round_: Round, proposed: Ints) -> dict[int, int]:
        """Write the masks of the rows that only lengthen their texts; return how many drafts each verifies."""
        slots, counts = self._steady.verified(round_, proposed, self._max_length)
        rows = round_.window + 1
        accepted = self._steady.accepted(slots, counts)
        plain = slots[accepted < 0]
        others = self._masks.others_than(self._steady.row_ids(round_.batch), rows)
        for slot in np.intersect1d(plain, others).tolist() if len(others) else ():
            self._masks.write_shared(slot * rows, self._steady.row(slot), rows)
        if len(plain) < len(slots):
            self._write_synthetic(rows, slots, counts, accepted, proposed)
        total = int(counts.sum())
        self._metrics.drafted += total
        self._metrics.evaluated += total
        return dict(zip(slots.tolist(), counts.tolist(), strict=True))

    def _write_synthetic(self, rows: int, slots: Ints, counts: Ints, accepted: Ints, proposed: Ints) -> None:
        """Write the masks of rows under the rule ``synthetic``, as accept_synthetic does."""
        for slot, count, kept in zip(slots.tolist(), counts.tolist(), accepted.tolist(), strict=True):
            if kept < 0:
                continue
            first, row, tokens = slot * rows, self._steady.row(slot), proposed[slot, :count].tolist()
            for at in range(kept):
                self._masks.allow_only(first + at, tokens[at])
            if kept < count:  # later rows are not read
                self._masks.write_without(first + kept, row, tokens[kept])
            else:
                self._masks.write_shared(first + kept, row)
            self._metrics.synthetic_drafts += kept

    def _write_alone(self, round_: Round, proposed: Ints, written: Container[int]) -> dict[int, DraftToVerify]:
        """Write the inputs of all other rows one by one, and empty masks for slots without a request."""
        rows, batch, window = round_.rows, round_.batch, round_.window
        tokens = proposed.tolist()
        drafts: dict[int, DraftToVerify] = {}
        slow = {
            slot: partial(self._write_masks, running, tokens[slot], round_)
            for slot, running in sorted(rows.items())
            if running.grammar_time is not None and running.grammar_time.last_fill_s > SLOW_S
        }
        started = self._parallel.start(slow) if slow else {}
        for slot in range(batch):
            if slot in written:
                continue
            if slot in rows:
                try:
                    filled = started[slot]() if slot in started else self._write_masks(rows[slot], tokens[slot], round_)
                    drafts[slot] = self._write_one(rows[slot], *filled, round_)
                    continue
                except BaseException as error:  # ends only this request
                    self._end(rows[slot], Finish("error", error))
            self._masks.write_shared(slot * (window + 1), NO_TOKENS, window + 1)
        return drafts

    def _write_masks(self, running: RunningRequest, proposed: list[int], round_: Round) -> tuple[list[int], FilledRows]:
        """Write the masks of one request; return its valid drafts and the result of fill_rows. Thread-safe."""
        most, first = round_.max_drafted(running), running.slot * (round_.window + 1)
        draft = proposed[: min(most, self._valid(running, most, round_))]
        if -1 in draft:
            draft = draft[: draft.index(-1)]
        overrule = running.request.rule is Rule.REJECTION and not round_.only_fast_forward
        with nullcontext() if running.grammar_time is None else running.grammar_time.step():
            limit = round_.max_fast_forward(running)
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
        from_text = running.slot in round_.copied or not round_.needs_drafter  # not of the drafter
        fast_forward = len(round_.fast_forward.get(running.slot, ())) if from_text else 0
        self._metrics.fast_forward_drafts += len(tokens) - max(0, kept - fast_forward)
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
