"""How much of its texts a draft was not fed yet, where rounds that draft nothing may leave it for later."""

from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.round import Round


class Backlog:
    """Tokens that rounds have emitted and that are in no cache of the draft: at most ``room`` of any slot.

    A run of the draft costs the same for one token as for a few, so rounds without drafts share one.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._most = 1  # tokens that any slot may have
        self._left = 0  # of these, those that the host may know of: a round has left them for later
        self._fed = True

    def may_wait(self, this: Round) -> bool:
        """``this`` round drafts nothing: whether it leaves what there is for later. Else it must be fed.

        A round with a window, whose tokens are forced, leaves nothing: behind what waits, drafters put one token a
        round.
        """
        self._fed = this.window > 0 or self._most >= self._room
        self._left = 0 if self._fed else self._most
        return not self._fed

    def feed(self) -> None:
        """All that there is is fed."""
        self._fed, self._left = True, 0

    def join(self) -> None:
        """A slot has a token from a prompt."""
        self._most = max(1, self._most)

    def emitted(self, this: Round) -> bool:
        """``this`` round has emitted tokens. Whether they are all there is, or stand behind what it left."""
        self._most = this.window + 1 + (0 if self._fed else self._most)
        return self._fed

    def held(self, running: Running) -> int:
        """How many tokens of a text the draft's caches hold at least, prefill aside."""
        return max(running.prefill_end, len(running.tokens) - 1 - self._left)
