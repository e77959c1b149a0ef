"""The drafter of bundles without a draft model, and the hooks that other drafters inherit from it."""

from collections.abc import Mapping, Sequence

from tandemrt.engines.contract.calls import Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class NullHooks:
    """The hooks of a round that a drafter has (see Drafter in engine_loop/drafter.py), which do nothing.

    A drafter overrides those that it needs.
    """

    reads_prompts_late = False

    @property
    def behind(self) -> bool:
        """See Drafter."""
        return False

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill."""

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.write_prompts."""

    def skip(self, round_: Round) -> None:
        """See Drafter.skip."""

    def after_target(self, round_: Round) -> None:
        """See Drafter.after_target."""

    def replaced(self, running: RunningRequest, kept: int) -> None:
        """See Drafter.replaced."""

    def after_verify(self, round_: Round) -> None:
        """See Drafter.after_verify."""

    def read_prompts(self, round_: Round) -> None:
        """See Drafter.read_prompts."""


class NoDrafter(NullHooks):
    """Drafts nothing: all drafts come from the text."""

    window = 0
    max_length: int | None = None
    caches = ()

    def propose(self, round_: Round) -> None:
        """See Drafter.propose. Never called: the window is 0."""

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens)
