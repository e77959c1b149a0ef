"""No drafting: a round decides one token, and what a constraint forces in front of it."""

from tandemrt.runtime.drafters.base import Unmoved
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.round import Round


class NoDrafter(Unmoved):
    """Stands where nobody drafts."""

    ahead = True
    window = 0
    reach: int | None = None
    caches = ()

    def held(self, running: Running) -> int:
        """See Drafter.held."""
        return len(running.tokens)

    def propose(self, this: Round) -> None:
        """See Drafter.propose. Never asked: the window is 0."""
