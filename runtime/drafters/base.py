"""What the loop asks of a drafter."""

from collections.abc import Mapping
from typing import Protocol

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.round.buffers import Buffer


class Drafter(Protocol):
    """Proposes tokens into ``RoundBuffers.draft_tokens``.

    ``ahead``: drafts from device state alone, so it may run before the host has committed the last round. Other
    drafters are asked after the commit and read the requests' tokens.
    """

    ahead: bool
    window: int

    def prefill(self, slot: int, start: int, count: int) -> None:
        """Take in prompt tokens [start, start + count) of ``slot``, whose ``length`` is ``start``."""

    def skip(self, rows: Mapping[int, Request]) -> None:
        """Take note that this round drafts nothing for ``rows``."""

    def propose(self, rows: Mapping[int, Request], batch: int, window: int, *, filters: bool) -> Buffer | None:
        """Draft ``window`` tokens for slots [0, batch), of which ``rows`` are live.

        ``filters``: whether any of them has what Engine.bind calls filters.

        Returns the laws the drafts were drawn from, float32 [batch, window, vocab], if any row's rule reads them.
        """
