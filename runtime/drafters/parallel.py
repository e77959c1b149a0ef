"""PARD: drafts from a model that predicts a whole window in one run, at mask tokens.

An, Bai et al., "PARD" (arXiv 2504.18583).
"""

from collections.abc import Mapping, Sequence

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed, repacked
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import cache_calls
from tandemrt.runtime.caches.prompt_calls import linear_prefill_call, packed_prefill_call
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.mask_tokens import MaskTokens
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import WindowSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class ParallelDrafter(NullHooks):
    """Runs the draft model once per round, over the tokens that the last round emitted and ``window`` - 1 mask tokens.

    The next round overwrites the cache entries of the mask tokens. Rounds without drafts defer their tokens, up to one
    window. Over a paged cache, the call also has the prompts of the round.
    """

    def __init__(self, draft: DraftResources, sampler: WindowSampler, *, mask_token: int, max_length: int) -> None:
        self.window = draft.window
        self.max_length: int | None = max_length
        self.caches = (draft.cache,)
        self._draft = draft
        self._sampler = sampler
        self._masks = MaskTokens(draft, mask_token)
        device, slots, window = draft.device, draft.slots, draft.window
        # `_counts` tokens of each slot that are not in the cache yet, the last at position `length`; -1 after them.
        self._new_tokens = torch.zeros(slots, 2 * window, dtype=torch.int64, device=device).fill_(-1)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._backlog = Backlog(window + 1)
        self._slot_ids = torch.arange(slots, device=device)
        self._index = torch.zeros(slots, dtype=torch.int64, device=device)
        self._token_ids = Buffer((slots, 2 * window), torch.int64, device)
        self._call = cache_calls(self._bind)

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join. The first round processes the last token, whether or not the slot is prefilled."""
        self._start([running.slot], [running.tokens[-1]])

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._new_tokens[slot].fill_(-1)  # an assignment would copy the number and wait for the device
        self._counts[slot].zero_()

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill."""
        length = self._draft.state.view("length", slot + len(tokens))[slot:]
        linear_prefill_call(self._draft.engine, self._draft.cache, slot, tokens, length, self._sampler.logits).run()
        self._start(range(slot, slot + len(tokens)), [after[0] for after in following])

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.write_prompts. The target's prompts are also the draft's."""
        self._start([chunk.slot for chunk in chunks], [texts[chunk.slot][chunk.end] for chunk in chunks])

    def skip(self, round_: Round) -> None:
        """See Drafter.skip. The backlog is processed with prompts, or when it is full."""
        shape = RoundShape(round_.batch, 0, prompts=round_.prompts)
        if shape.prompts != NO_PROMPTS:
            self._backlog.mark_processed()
            self._draft.graphs.run_eagerly(lambda: self._run(shape), "prompts")
        elif shape.batch and not self._backlog.defer(round_):
            graphs = self._draft.graphs
            graphs.run(("feed", shape), lambda: self._run(shape), outputs=[], capturable=self._draft.capturable)

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose. One run of the model and one sampling call."""
        shape = round_.shape
        self._backlog.mark_processed()
        return self._sampler.propose(round_, shape, lambda: self._sampler.sample(shape, lambda _step: self._run(shape)))

    def after_verify(self, round_: Round) -> None:
        """See Drafter.after_verify."""
        batch, query, counts = round_.batch, round_.window + 1, self._counts[: round_.batch]
        tokens = self._draft.buffers.tokens.view(batch, query)
        if self._backlog.emitted(round_):
            self._new_tokens[:batch, :query] = tokens
            self._new_tokens[:batch, query:].fill_(-1)
            counts.copy_(self._draft.buffers.count.view(batch))
            return
        self._new_tokens[self._slot_ids[:batch], counts] = tokens[:, 0]  # the round emits at most one token
        counts.add_(self._draft.buffers.count.view(batch))

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return self._backlog.cached_tokens(running)

    def _start(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the only new token of each of ``slots``."""
        for slot, token in zip(slots, tokens, strict=True):
            self._new_tokens[slot].fill_(-1)
            upload([token], self._new_tokens[slot, :1])
            self._counts[slot].fill_(1)
        self._backlog.join()

    def _run(self, shape: RoundShape) -> None:
        """Run the model over new tokens and masks. A row without new tokens has masks only."""
        batch, prompts = shape.batch, shape.prompts
        draft = self._draft
        if not batch:
            packed_prefill_call(
                draft.engine, draft.cache, draft.layout, repacked(0, prompts), self._sampler.logits
            ).run()
            return
        scored, query = self._rows_and_tokens(shape.window)
        counts = self._counts[:batch]
        shape = RoundShape(batch, shape.window, prompts=repacked(batch * query, prompts))
        ids = draft.layout.windows(self._token_ids.view(batch, query), shape.prompts)
        self._masks.write(ids, self._new_tokens[:batch, :query])
        index = self._index[:batch]
        torch.sub(draft.state.view("length", batch), counts, out=index)
        torch.add(index, 1, out=index)
        self._masks.score_from_last(counts, scored, query)
        self._call(shape).run()

    def _rows_and_tokens(self, window: int) -> tuple[int, int]:
        """Scored rows (at least one, which a paged decoder needs) and tokens, per row of the call."""
        return max(1, window), self.window + 1 + max(0, window - 1)

    def _bind(self, shape: RoundShape) -> Call:
        batch = shape.batch
        scored, query = self._rows_and_tokens(shape.window)
        tokens, rows = self._token_ids.view(batch, query), self._masks.score_rows.view(batch, scored)
        return self._draft.bind(tokens, rows, self._index[:batch], self._sampler.logits, prompts=shape.prompts)
