"""What a round asks of a drafter."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandemrt.engines.calls import Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import SlotListener
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.round import Round


class Drafter(SlotListener, Protocol):
    """Proposes tokens into ``RoundBuffers.draft_tokens``.

    ``ahead``: drafts from device state alone, so it may run before the host has committed the last round. Other
    drafters are asked after the commit and read the requests' tokens. ``window``: drafted tokens per round at most; 0:
    it is never asked. ``reach`` is the length of text behind which its drafts mean nothing; None: there is none.
    ``late``: it reads the prompts of a round's calls behind the round, so for one that ends there it drafts nothing yet
    that means anything.

    What Round.forced says takes the place of drafts behind the drafter (round/fill.py); one that reads the text may go
    on from there.
    """

    ahead: bool
    window: int
    reach: int | None
    late: bool

    @property
    def caches(self) -> Sequence[Cache]:
        """The key/value caches of its own models, none without one."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """Take in the next prompt tokens [slots, tokens] of slots from ``slot`` on, where its caches are linear.

        The target has taken them in. ``following``: the tokens behind them, of each slot: one at least, and as many as
        layers draft where the text has them.
        """

    def held(self, running: Running) -> int:
        """How many tokens of a text its caches hold at least, prefill aside; all of them if it has none."""

    def skip(self, this: Round) -> None:
        """Take note that ``this`` round drafts nothing, and take in its prompts."""

    def overruled(self, running: Running, kept: int) -> None:
        """Take note that of the window it just drafted only the first ``kept`` tokens are verified, then others."""

    def needed(self, this: Round) -> int:
        """How long the window of ``this`` round has to be, at most as it is. Asked behind the last commit."""

    def propose(self, this: Round) -> Buffer | None:
        """Draft the window of ``this`` round, at least one token, and take in its prompts.

        Returns the probabilities the drafts were drawn from, float32 [batch, window, vocab], if a rule reads them.
        """

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """Take note of the prompts that ride along with a round, where caches are paged; ``texts``: tokens by slot."""

    def scored(self, this: Round) -> None:
        """Take note of what the target gives for ``this`` round and its prompts, in ``RoundBuffers``."""

    def verified(self, this: Round) -> None:
        """Take note of what ``this`` round decided, in ``RoundBuffers`` as the target and verification left it."""


class Unmoved:
    """Hooks in which there is nothing to do, for drafters to override those where there is."""

    late = False

    def join(self, running: Running) -> None:
        """See SlotListener.join."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill."""

    def skip(self, this: Round) -> None:
        """See Drafter.skip."""

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled."""

    def needed(self, this: Round) -> int:
        """See Drafter.needed."""
        return this.window

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.reads."""

    def scored(self, this: Round) -> None:
        """See Drafter.scored."""

    def verified(self, this: Round) -> None:
        """See Drafter.verified."""
