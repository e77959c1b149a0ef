"""Drafts copied from the text of each request, where that promises more accepted tokens than its drafter.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with a choice per request.
"""

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.drafters.copy_source import CopySource
from tandemrt.runtime.requests.acceptance import Acceptance
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class TextLookup:
    """Copies drafts from the text of each request in a slot (a SlotListener), beside any drafter or without one.

    The choice depends only on the request's committed tokens, and on what was accepted of its own drafts. So it does
    not depend on other requests or on the clock, and a round that repeats a dropped one copies the same. Only under
    the coupled rule, whose texts do not depend on drafts, copies are cut where they would widen all rows for little.
    """

    def __init__(self, shortest: int, longest: int, *, beside_model: bool = False, row_cost: float = 0.0) -> None:
        """See CopySource. ``row_cost``: of a scored token, as a share of what a round costs without any."""
        self._sizes = shortest, longest
        self._beside_model = beside_model
        self._row_cost = row_cost
        self._sources: WeakKeyDictionary[RunningRequest, CopySource] = WeakKeyDictionary()  # survives preemption
        self._acceptance: WeakKeyDictionary[RunningRequest, Acceptance] = WeakKeyDictionary()  # of the drafter's drafts

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        if running not in self._sources:
            self._sources[running] = CopySource(*self._sizes)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def observe(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` tokens that the drafter proposed."""
        self._acceptance.setdefault(running, Acceptance()).observe(accepted, proposed)

    def copies(self, round_: Round) -> dict[int, list[int]]:
        """Return the complete draft windows of slots that copy: fast-forward tokens, continued from the text."""
        copies, expected = {}, {}
        for slot, running in round_.rows.items():
            fast_forward = round_.fast_forward.get(slot, ())
            most = round_.max_drafted(running) - len(fast_forward)
            if most < 1 or running.replay.rereading:
                continue
            source = self._sources[running]
            source.read(running.tokens, len(running.request.prompt))
            copied = source.copy(most, fast_forward)
            acceptance = self._acceptance.get(running)
            drafted = 0.0 if acceptance is None else acceptance.expected_tokens(min(most, round_.num_proposed)) - 1
            if copied.tokens and copied.expected >= drafted:
                copies[slot] = [*fast_forward, *copied.tokens]
                expected[slot] = copied.expected / len(copied.tokens)
        drafts_too = self._beside_model and replace(round_, copied=copies).needs_drafter
        if drafts_too or Rule.REJECTION in round_.rules:
            return copies
        window = self._best_window(round_, {slot: len(tokens) for slot, tokens in copies.items()}, expected)
        return {slot: tokens[:window] for slot, tokens in copies.items()} if window else {}

    def _best_window(self, round_: Round, lengths: Mapping[int, int], expected: Mapping[int, float]) -> int:
        """Return the window with which most tokens are expected per time; ``expected`` per copied token, by slot."""
        shortest = max(map(len, round_.fast_forward.values()), default=0)

        def speed(window: int) -> float:
            tokens = sum(expected[slot] * min(length, window) for slot, length in lengths.items())
            return (len(round_.rows) + tokens) / (1 + self._row_cost * round_.batch * (window + 1))

        return max(range(shortest, max([shortest, *lengths.values()]) + 1), key=speed)
