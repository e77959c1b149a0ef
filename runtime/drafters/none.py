"""No drafting: every round decides one token."""

from collections.abc import Mapping

from tandemrt.runtime.requests.request import Request


class NoDrafter:
    """The drafter of plain decoding."""

    ahead = True
    window = 0

    def prefill(self, slot: int, start: int, count: int) -> None:
        """See Drafter.prefill."""

    def skip(self, rows: Mapping[int, Request]) -> None:
        """See Drafter.skip."""

    def propose(self, rows: Mapping[int, Request], batch: int, window: int, *, filters: bool) -> None:
        """See Drafter.propose. Never asked: the window is 0."""
