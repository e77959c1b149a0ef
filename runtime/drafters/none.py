"""No drafting: a round decides one token, and what a constraint forces in front of it."""

from collections.abc import Sequence

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.drafters.base import Unmoved
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.round import Round


class NoDrafter(Unmoved):
    """Stands where nobody drafts."""

    ahead = True
    window = 0
    reach: int | None = None
    caches = ()

    def join(self, running: Running) -> None:
        """See SlotListener.join."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        """See Drafter.prefill."""

    def held(self, running: Running) -> int:
        """See Drafter.held."""
        return len(running.tokens)

    def skip(self, this: Round) -> None:
        """See Drafter.skip."""

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled."""

    def propose(self, this: Round) -> None:
        """See Drafter.propose. Never asked: the window is 0."""
