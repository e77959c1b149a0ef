"""Rows whose next tokens only lengthen their texts: the host handles those of a round at once, as arrays over slots.

Most rows of most rounds are such ones. Each of them alone would cost the host more than it takes a small target.
"""

import numpy as np
import numpy.typing as npt

from tandemrt.runtime.constraints.ordinary import OrdinaryTokens
from tandemrt.runtime.engine_loop.synthetic import num_accepted, synthetic_rate
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest

Ints = npt.NDArray[np.int64]


class SteadyRows:
    """What is known of the slots with a SteadyText (a SlotListener).

    ``watch`` adds a request after a commit of its own. It stays until a round brings it a token that may do more than
    lengthen its text, or until it leaves its slot. Meanwhile ``length`` follows its text here.
    """

    def __init__(self, slots: int) -> None:
        self._length = np.zeros(slots, np.int64)  # tokens of the text
        self._end = np.zeros(slots, np.int64)  # length up to which SteadyText holds; 0: it does not
        self._limit = np.zeros(slots, np.int64)  # most tokens of the text
        self._num_draft_tokens = np.zeros(slots, np.int64)  # of the request
        self._only_masks = np.zeros(slots, np.bool_)  # whether masks are all that verification needs
        self._rates = np.zeros(slots, np.float64)  # of the rule ``synthetic``; -1: another rule
        self._seeds = np.zeros(slots, np.uint64)
        self._row_ids = np.zeros(slots, np.int64)
        self._rows: list[npt.NDArray[np.int32] | None] = [None] * slots
        self._ordinary: list[OrdinaryTokens | None] = [None] * slots

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        self.leave(running.slot)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._end[slot] = self._row_ids[slot] = 0
        self._rows[slot] = self._ordinary[slot] = None

    def watch(self, running: RunningRequest) -> None:
        """Add ``running`` if its text is steady, after its own commit; otherwise remove it."""
        slot, steady = running.slot, running.steady_text()
        if steady is None or steady.room < 1:
            self.leave(slot)
            return
        request = running.request
        self._length[slot] = len(running.tokens)
        self._end[slot] = len(running.tokens) + steady.room
        self._limit[slot] = request.max_length
        self._num_draft_tokens[slot] = request.num_draft_tokens
        self._only_masks[slot] = running.penalties is None
        mean, most = request.synthetic, request.num_draft_tokens
        self._rates[slot] = -1.0 if mean is None else synthetic_rate(mean, most)
        self._seeds[slot] = request.seed % 2**64
        self._rows[slot], self._row_ids[slot], self._ordinary[slot] = steady.row, id(steady.row), steady.ordinary

    def lengthened(self, round_: Round, tokens: Ints, counts: Ints) -> Ints:
        """Return the slots whose emitted tokens, the first ``counts`` of each row, only lengthen the text."""
        slots = self._of(round_)
        if not len(slots):
            return slots
        emitted = counts[slots]
        fits = (emitted > 0) & (self._length[slots] + emitted <= self._end[slots])
        return slots[fits & self._all_ordinary(slots, tokens[slots], emitted)]

    def append(self, slots: Ints, counts: Ints) -> None:
        """Follow the texts of ``slots``, which get ``counts`` [slots] tokens."""
        self._length[slots] += counts

    def most_drafts(self, round_: Round, slots: Ints) -> Ints:
        """Return Round.max_drafted of ``slots``, before their tokens are appended."""
        most: Ints = np.minimum(self._num_draft_tokens[slots], self._limit[slots] - self._length[slots] - 1)
        return np.minimum(most, np.int64(round_.window))

    def verified(self, round_: Round, drafts: Ints, max_length: int | None) -> tuple[Ints, Ints]:
        """Return slots, and how many of their ``drafts`` [batch, window] to verify.

        The mask rows of these tokens, and the one after them, are those of the slots (``row``). ``max_length``: see
        Drafter.
        """
        slots = self._of(round_)
        slots = slots[self._only_masks[slots]]
        if others := {*round_.may_fast_forward, *round_.undrafted, *round_.copied}:
            slots = slots[~np.isin(slots, list(others))]
        if not len(slots) or round_.only_fast_forward:
            return slots[:0], slots[:0]
        length, count = self._length[slots], self.most_drafts(round_, slots)
        if max_length is not None:
            count = np.clip(max_length + 1 - length, 0, count)
        # A row of its own may follow the last token before a limit.
        fits = (length + count < self._end[slots]) & self._all_ordinary(slots, drafts[slots], count)
        return slots[fits], count[fits]

    def accepted(self, slots: Ints, counts: Ints) -> Ints:
        """Return how many of ``counts`` drafted tokens the rule ``synthetic`` accepts; -1 by another rule."""
        rates = self._rates[slots]
        if (rates < 0).all():
            return np.full(len(slots), -1, np.int64)
        return np.where(rates < 0, -1, num_accepted(rates, self._seeds[slots], self._length[slots], counts))

    def row_ids(self, batch: int) -> Ints:
        """Return the ``id`` of the mask row of each slot, 0 for others."""
        return self._row_ids[:batch]

    def row(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the mask row of a slot."""
        row = self._rows[slot]
        assert row is not None
        return row

    def _of(self, round_: Round) -> Ints:
        slots = np.fromiter(round_.rows, np.int64, len(round_.rows))
        return slots[self._end[slots] > 0]

    def _all_ordinary(self, slots: Ints, tokens: Ints, counts: Ints) -> npt.NDArray[np.bool_]:
        """Return for each slot whether the first ``counts`` of its ``tokens`` [slots, n] are ordinary."""
        if not tokens.size:
            return np.ones(len(slots), np.bool_)
        of_slots = [self._ordinary[slot] for slot in slots.tolist()]
        first = of_slots[0]
        assert first is not None
        ordinary = first.among(tokens)
        for at, own in enumerate(of_slots):
            if own is not first and own is not None:  # of a request with other stop tokens or delimiters
                ordinary[at] = own.among(tokens[at])
        beyond = np.arange(tokens.shape[1]) >= counts[:, None]
        fits: npt.NDArray[np.bool_] = (ordinary | beyond).all(axis=1)
        return fits
