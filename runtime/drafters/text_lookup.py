"""Drafts copied from the text of each request, where that promises more accepted tokens than its drafter.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with a choice per request.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.drafters.copy_source import CopySource
from tandemrt.runtime.requests.acceptance import Acceptance
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest

_SAMPLE = 8  # rows of a round that stand for all: those of many requests take the host long
_UNTRIED_CHANCE = 0.8  # that a request's first token of the drafter is accepted


class _Outlook(NamedTuple):
    """What a request may draft in a round after its ``fast_forward`` tokens, and how much of that may be accepted.

    ``copied`` tokens, each with a ``chance``, or ``proposed`` accepted ones of the drafter.
    """

    fast_forward: Sequence[int]
    copied: Sequence[int]
    chance: float
    proposed: float

    @property
    def copies(self) -> bool:
        """Whether copies promise as much as the drafter or more."""
        return bool(self.copied) and self.expected() >= self.proposed

    def window(self, size: int | None = None) -> list[int]:
        """The draft window of at most ``size`` tokens without the drafter."""
        return [*self.fast_forward, *self.copied][:size]

    def expected(self, size: int | None = None) -> float:
        """Return how many copied tokens of that window may be accepted."""
        copied = len(self.copied) if size is None else min(size - len(self.fast_forward), len(self.copied))
        return self.chance * max(0, copied)


class TextLookup:
    """Copies drafts from the text of each request in a slot (a SlotListener), beside any drafter or without one.

    Beside a drafter, a request copies where its copies promise more accepted tokens. A round in which the drafter has
    not run yet may also do without it, if copies alone promise more tokens per time.

    What is expected depends only on the request's committed tokens, and on what was accepted of its own drafts. Under
    the rejection rule, whose texts depend on drafts, nothing else decides.
    """

    def __init__(
        self,
        shortest: int,
        longest: int,
        *,
        with_drafter: bool = False,
        rejection: bool = True,
        cost: Callable[[Round, int], float] = lambda _round, _window: 1.0,
        draft_cost: Callable[[Round, int], float] = lambda _round, _tokens: 0.0,
    ) -> None:
        """
        Args:
            shortest, longest: see CopySource.
            with_drafter: whether there is a drafter.
            rejection: whether requests under the rejection rule copy too.
            cost: of a round that scores so many drafted tokens per row; only ratios are used.
            draft_cost: of so many tokens of the drafter per row, in the same unit; 0 if ``cost`` includes it.
        """
        self._sizes = shortest, longest
        self._with_drafter = with_drafter
        self._rejection = rejection
        self._cost = cost
        self._draft_cost = draft_cost
        self._sources: WeakKeyDictionary[RunningRequest, CopySource] = WeakKeyDictionary()  # survives preemption
        self._acceptance: WeakKeyDictionary[RunningRequest, Acceptance] = WeakKeyDictionary()  # of the drafter's drafts
        self._observed: WeakKeyDictionary[RunningRequest, list[tuple[int, int]]] = (
            WeakKeyDictionary()
        )  # not counted yet

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        if running not in self._sources:
            self._sources[running] = CopySource(*self._sizes)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def observe(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` tokens that the drafter proposed."""
        self._observed.setdefault(running, []).append((accepted, proposed))

    def promises(self, round_: Round, wait: float) -> bool:
        """See Lookup.promises. A text under the rejection rule must not depend on other requests or the clock."""
        if self._rejection and Rule.REJECTION in round_.rules:
            return True
        widening = self._cost(round_, round_.window) / self._cost(round_, round_.num_proposed * self._with_drafter)
        least = (1 + wait) * widening
        rows = list(round_.rows.values())
        return self._gain(round_, rows[:_SAMPLE]) > least and (len(rows) <= _SAMPLE or self._gain(round_, rows) > least)

    def copies(self, round_: Round, *, proposed: bool) -> dict[int, list[int]]:
        """See Lookup.copies."""
        outlooks = {slot: self._outlook(round_, running) for slot, running in round_.rows.items()}
        copies = {slot: outlook.window() for slot, outlook in outlooks.items() if outlook.copies}
        needs_drafter = self._with_drafter and replace(round_, copied=copies).needs_drafter
        if Rule.REJECTION in round_.rules or (needs_drafter and proposed):
            return copies
        window, speed = self._best_window(round_, outlooks.values())
        if needs_drafter and (not window or speed <= self._speed_with_drafter(round_, outlooks.values())):
            return copies
        every = window and needs_drafter  # a slot without a copy drafts nothing, else the drafter would run
        return {
            slot: outlook.window(window) for slot, outlook in outlooks.items() if every or (window and outlook.copied)
        }

    def _gain(self, round_: Round, rows: Iterable[RunningRequest]) -> float:
        """Return the tokens of ``rows`` that are expected with copies, as a ratio to those without."""
        outlooks = [self._outlook(round_, running) for running in rows]
        without = sum(1 + outlook.proposed for outlook in outlooks)
        return 1 + sum(outlook.expected() - outlook.proposed for outlook in outlooks if outlook.copies) / without

    def _outlook(self, round_: Round, running: RunningRequest) -> _Outlook:
        fast_forward = round_.fast_forward.get(running.slot, ())
        most = round_.max_drafted(running) - len(fast_forward)
        accepted = self._accepted(running, min(most, round_.num_proposed))
        if most < 1 or running.replay.rereading or (running.request.rule is Rule.REJECTION and not self._rejection):
            return _Outlook(fast_forward, (), 0.0, accepted)
        source = self._sources[running]
        source.read(running.tokens, len(running.request.prompt))
        tokens, expected = source.copy(most, fast_forward)
        return _Outlook(fast_forward, tokens, expected / max(1, len(tokens)), accepted)

    def _accepted(self, running: RunningRequest, proposed: int) -> float:
        """Return how many tokens may be accepted of those that the drafter proposes."""
        if not self._with_drafter or proposed < 1:
            return 0.0
        for accepted, drafted in self._observed.pop(running, ()):
            self._acceptance.setdefault(running, Acceptance()).observe(accepted, drafted)
        acceptance = self._acceptance.get(running)
        if acceptance is None:
            return sum(_UNTRIED_CHANCE**place for place in range(1, proposed + 1))
        return acceptance.expected_tokens(proposed) - 1

    def _best_window(self, round_: Round, outlooks: Collection[_Outlook]) -> tuple[int, float]:
        """Return the window of a round without the drafter that promises most tokens per time, and these.

        The drafter processes what it missed later, in about the time of a token.
        """
        missed = self._draft_cost(round_, 1)

        def speed(window: int) -> float:
            tokens = len(outlooks) + sum(outlook.expected(window) for outlook in outlooks)
            return tokens / (self._cost(round_, window) + missed)

        shortest = max((len(outlook.fast_forward) for outlook in outlooks), default=0)
        longest = max((len(outlook.window()) for outlook in outlooks), default=0)
        best = max(range(shortest, longest + 1), key=speed)
        return best, speed(best)

    def _speed_with_drafter(self, round_: Round, outlooks: Collection[_Outlook]) -> float:
        drafted = round_.num_proposed
        tokens = sum(outlook.expected(drafted) if outlook.copies else outlook.proposed for outlook in outlooks)
        return (len(outlooks) + tokens) / (self._cost(round_, drafted) + self._draft_cost(round_, drafted))
