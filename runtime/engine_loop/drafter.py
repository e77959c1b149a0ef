"""The interfaces of what drafts: a drafter, and a lookup that copies from the text."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandemrt.engines.contract.calls import Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.slots import SlotListener


class Lookup(SlotListener, Protocol):
    """Copies drafts from the text of each request in a slot."""

    def promises(self, round_: Round, wait: float) -> bool:
        """Return whether copies in ``round_`` are worth a ``wait`` for the last commit, a share of the round's time.

        Called before that commit.
        """

    def copies(self, round_: Round, *, proposed: bool) -> Mapping[int, Sequence[int]]:
        """Return the draft windows of slots that copy, see Round.copied. Called after the commit of the last round.

        ``proposed``: whether the drafter has run. If not, no slot needs it where all have a window, maybe an empty one.
        """

    def observe(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` tokens of the drafter."""


class Drafter(SlotListener, Protocol):
    """Proposes the draft window of a round into ``RoundBuffers.draft_tokens``.

    The loop calls the hooks of a round in this order: ``write_prompts``, ``propose`` or ``skip``, ``after_target``,
    ``replaced``, ``after_verify``, ``read_prompts``. Drafts from the text (``Round.drafted_from_text``) replace drafts
    after ``propose``. The loop may call ``propose`` before the host has committed the last round.

    Attributes:
        window: maximum drafted tokens per round; if 0, ``propose`` is never called.
        max_length: maximum text length, in tokens, for which its drafts are valid; None for no limit.
        reads_prompts_late: it processes the prompts of a round after the target, so that its drafts for a request are
            valid only from the round after the end of the prompt.
    """

    window: int
    max_length: int | None
    reads_prompts_late: bool

    @property
    def behind(self) -> bool:
        """Whether drafts from the text replaced its own, so that its next drafts need the committed text."""

    @property
    def caches(self) -> Sequence[Cache]:
        """The KV caches of its own models; empty without a model."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """Process the next prompt tokens [slots, tokens] of the slots from ``slot`` on, over linear caches.

        The target has already processed them. ``following``: per slot, the tokens after the chunk: at least one, and
        up to one per draft layer if the text is long enough.
        """

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """Upload the prompts of a round over paged caches. ``texts``: tokens by slot."""

    def propose(self, round_: Round) -> Buffer | None:
        """Draft the window of the round, at least one token; may process its prompts.

        Returns the probabilities that the drafts were sampled from, float32 [batch, window, vocab], if a verification
        rule of the round reads them.
        """

    def skip(self, round_: Round) -> None:
        """Do what a round needs that drafts nothing; may process its prompts."""

    def after_target(self, round_: Round) -> None:
        """Process the target's outputs (in ``RoundBuffers``) for the round."""

    def replaced(self, running: RunningRequest, kept: int) -> None:
        """Handle that drafts from the text replace those of a request after the first ``kept`` ones."""

    def after_verify(self, round_: Round) -> None:
        """Process the emitted tokens of the round, in ``RoundBuffers``."""

    def read_prompts(self, round_: Round) -> None:
        """Process the prompts of the round that are left, at its end: its tokens do not wait for this."""

    def cached_tokens(self, running: RunningRequest) -> int:
        """Return a lower bound on the tokens of a text in its caches, ignoring prefill; all tokens without a cache."""
