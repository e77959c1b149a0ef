"""Drafts copied from the text of each request, where that promises more accepted tokens than its drafter.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with a choice per request.
"""

from weakref import WeakKeyDictionary

from tandemrt.runtime.drafters.copy_source import CopySource
from tandemrt.runtime.requests.acceptance import Acceptance
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class TextLookup:
    """Copies drafts from the text of each request in a slot (a SlotListener), beside any drafter or without one.

    The choice depends only on the request's committed tokens, and on what was accepted of its own drafts. So it does
    not depend on other requests or on the clock, and a round that repeats a dropped one copies the same.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """See CopySource."""
        self._sizes = shortest, longest
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
        copies = {}
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
        return copies
