"""Count the emitted tokens that a draft has not processed yet."""

from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class Backlog:
    """Counts emitted tokens that the draft has not processed yet, at most ``room`` per slot.

    A run of the draft takes as long for one token as for a few, so rounds without drafts share one run.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._most = 1  # upper bound of the tokens in any slot
        self._deferred = 0  # how many of them a round has deferred, so that the host may have committed them
        self._processed = True

    def defer(self, round_: Round) -> bool:
        """Return whether the round, which drafts nothing, defers the backlog; if not, it must process it.

        A round with fast-forward tokens defers nothing, because drafters can append only one token per round.
        """
        self._processed = round_.window > 0 or self._most >= self._room
        self._deferred = 0 if self._processed else self._most
        return not self._processed

    def mark_processed(self) -> None:
        """Mark the backlog as processed."""
        self._processed, self._deferred = True, 0

    def join(self) -> None:
        """Count the last prompt token of a request that joins."""
        self._most = max(1, self._most)

    def emitted(self, round_: Round) -> bool:
        """Count the tokens of the round. Return whether they replace the backlog; if not, append them."""
        self._most = round_.window + 1 + (0 if self._processed else self._most)
        return self._processed

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return max(running.prefill_end, len(running.tokens) - 1 - self._deferred)
