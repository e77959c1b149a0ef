"""Drafts from a block of masks that reads the target's states in the draft's own cache: DFlash, DSpark.

"DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from types import MappingProxyType

from tandemrt.engines.calls import NO_PROMPTS, Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.at_once import AtOnceDrafter
from tandemrt.runtime.drafters.drawing import DrawingDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.prompt_calls import MOST_PACKED
from tandemrt.runtime.round.round import Round


class BlockDrafter(DrawingDrafter):
    """Runs the draft once a round, over the newest token and ``block`` - 1 masks.

    Each mask foresees one token, in its place; if ``sample_from_anchor``, each token does, the newest too, the one
    behind it.

    Its cache holds, for every token that the target has computed, keys and values of the target's features of it. The
    target's call of a round gives those of the whole window; verification says how many of them are the text's, and the
    next block is written behind these, over the others and over the block before. So whatever a round does, there is
    nothing to catch up with. A block is always as long as the draft was trained with; a shorter window is its
    beginning.

    Its engine "context" takes the features in. The prompts of its resources are the target's, whose places are those of
    their features. A prompt that ends in a round is drafted for from the next one on.
    """

    def __init__(self, resources: DraftResources, *, mask_token: int, block: int, sample_from_anchor: bool) -> None:
        super().__init__(resources)
        self.late = resources.runs is not None
        self._block, self._first_row = block, 0 if sample_from_anchor else 1
        self._feature_width = int(self._engines["context"].contract["features"].shape[-1])
        self._ids = torch.zeros(self._slots, block, dtype=torch.int64, device=self._device).fill_(mask_token)
        self._context_call = cache(partial(self._bind_context, prompts=NO_PROMPTS))  # their graphs stay, so they do
        self._packed_context_call = lru_cache(MOST_PACKED)(self._bind_context)

    @abstractmethod
    def _draft(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        """Run the block of ``_ids`` and draw from what it gives."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        """See Drafter.prefill."""
        slots, count = tokens.shape
        features = self._buffers.prompt_features
        assert features is not None
        self._engines["context"].bind(
            {
                "features": features.view(slots, count, self._feature_width),
                "write_index": self._state.view("length", slot + slots)[slot:],
                **self._cache.rows(slot, slots),
            }
        ).run()

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the block."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)

        def work() -> None:
            self._ids[:batch, 0].copy_(self._state.newest[:batch, 1])
            self._draft(batch, window, keep_probs=draft_probs is not None, filters=filters)

        self._run(("propose", batch, window, draft_probs is None, filters), work, outputs)
        return draft_probs

    def scored(self, this: Round) -> None:
        """See Drafter.scored. Features of the window and of prompts go into the cache."""
        batch, rows, prompts = this.batch, this.window + 1, this.prompts
        if prompts != NO_PROMPTS:
            self._graphs.run_eagerly(self._packed_context_call(batch, rows, prompts).run, "prompts")
        else:
            call = self._context_call(batch, rows)
            capturable = self._engines["context"].capturable
            self._graphs.run(("context", batch, rows), call.run, outputs=[], capturable=capturable)

    def _bind_block(
        self,
        batch: int,
        window: int,
        others: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        logits: Buffer | None = None,
    ) -> Call:
        """The block's call, whose rows are those that foresee the window; ``others``, ``logits``: see _bind_windows."""
        first = self._first_row
        rows = self._starts(batch, self._block) + torch.arange(first, first + window, device=self._device)
        index = self._state.view("length", batch)
        return self._bind_windows(self._ids[:batch], rows, index, others, logits=logits)

    def _bind_context(self, batch: int, rows: int, prompts: Packed) -> Call:
        features = self._buffers.features
        assert features is not None
        if self._runs is None:
            shape: tuple[int, ...] = (batch, rows)
        else:
            shape = (batch * rows + prompts.prompt_tokens,)
        index = self._state.view("length", batch)
        given = {
            "features": features.view(*shape, self._feature_width),
            # A packed call has one row at least, here one without tokens.
            "write_index": index if batch else torch.zeros(1, dtype=torch.int64, device=self._device),
            **self._cache.rows(0, max(1, batch)),
        }
        if prompts != NO_PROMPTS:
            assert self._runs is not None
            given |= self._runs.bindings(prompts)
        return self._engines["context"].bind(given)


class DFlashDrafter(BlockDrafter, AtOnceDrafter):
    """Draws all tokens at once."""

    def __init__(self, resources: DraftResources, *, mask_token: int, block: int, sample_from_anchor: bool) -> None:
        super().__init__(resources, mask_token=mask_token, block=block, sample_from_anchor=sample_from_anchor)
        self._block_call = cache(self._bind_block)

    def _draft(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        """See BlockDrafter._draft. One draw."""
        self._block_call(batch, window).run()
        self._draw(batch, window, keep_probs=keep_probs, filters=filters)
