"""Drafts from a model that foresees a whole window in one run, behind mask tokens: PARD.

An, Bai et al., "PARD" (arXiv 2504.18583).
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.calls import NO_PROMPTS, Packed, beside
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.at_once import AtOnceDrafter, write_masked
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.prompt_calls import MOST_PACKED, prefill_call, prompts_call
from tandemrt.runtime.round.round import Round


class ParallelDrafter(AtOnceDrafter):
    """Runs the draft model once a round, over the tokens that the last round emitted and ``window`` - 1 mask tokens.

    The last token and every mask behind it foresee one token each, which are drawn at once. What masks have written
    into the cache is written again by the next round: of drafted tokens that were accepted no state is kept.

    Rounds that draft nothing leave what they emit for later, as much as a window may emit. Over a paged cache, a
    round's prompts ride along.

    ``mask_token`` is what the model was trained with; ``reach``: see Drafter.
    """

    def __init__(self, resources: DraftResources, *, mask_token: int, reach: int) -> None:
        super().__init__(resources, reach=reach)
        device, slots, window = self._device, resources.slots, resources.window
        self._mask = mask_token
        # Tokens of each slot that are in no cache yet, and -1 behind them: `_counts` of them up to `length`.
        self._line = torch.zeros(slots, 2 * window, dtype=torch.int64, device=device).fill_(-1)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._backlog = Backlog(window + 1)
        self._slot_ids = torch.arange(slots, device=device)
        self._index = torch.zeros(slots, dtype=torch.int64, device=device)
        self._token_ids = Buffer((slots, 2 * window), torch.int64, device)
        self._run_call = cache(self._bind_run)
        self._packed_call = lru_cache(MOST_PACKED)(self._bind_packed)

    def join(self, running: Running) -> None:
        """See SlotListener.join. Whatever is prefilled, the last token is fed by the first round."""
        self._expect([running.slot], [running.tokens[-1]])

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. A free slot is as one that a round has emitted nothing for: see SlotState.leave."""
        self._line[slot] = -1
        self._counts[slot] = 0

    def held(self, running: Running) -> int:
        """See Drafter.held."""
        return self._backlog.held(running)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill."""
        length = self._state.view("length", slot + len(tokens))[slot:]
        prefill_call(self._engines["draft"], self._cache, slot, tokens, length, self._logits).run()
        self._expect(range(slot, slot + len(tokens)), [behind[0] for behind in following])

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.reads."""
        self._expect([chunk.slot for chunk in chunks], [texts[chunk.slot][chunk.end] for chunk in chunks])

    def skip(self, this: Round) -> None:
        """See Drafter.skip. What its rows have is fed with prompts, or where no more may wait."""
        batch, prompts = this.batch, this.prompts
        if prompts != NO_PROMPTS:
            self._backlog.feed()
            self._graphs.run_eagerly(lambda: self._feed(batch, 0, prompts), "prompts")
        elif batch and not self._backlog.may_wait(this):
            self._run(("feed", batch), lambda: self._feed(batch, 0, prompts), [])

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw."""
        batch, window, filters, prompts = this.batch, this.window, this.filters, this.prompts
        draft_probs, outputs = self._proposal(this)
        self._backlog.feed()

        def work() -> None:
            self._feed(batch, window, prompts)
            self._draw(batch, window, keep_probs=draft_probs is not None, filters=filters)

        if prompts != NO_PROMPTS:
            self._graphs.run_eagerly(work, "prompts")
        else:
            self._run(("propose", batch, window, draft_probs is None, filters), work, outputs)
        return draft_probs

    def verified(self, this: Round) -> None:
        """See Drafter.verified."""
        batch, query, counts = this.batch, this.window + 1, self._counts[: this.batch]
        tokens = self._buffers.tokens.view(batch, query)
        if self._backlog.emitted(this):
            self._line[:batch, :query] = tokens
            self._line[:batch, query:] = -1
            counts.copy_(self._buffers.count.view(batch))
            return
        self._line[self._slot_ids[:batch], counts] = tokens[:, 0]  # it emits a token at most
        counts.add_(self._buffers.count.view(batch))

    def _expect(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The token that the next round feeds is the only one of these slots."""
        for slot, token in zip(slots, tokens, strict=True):
            self._line[slot] = -1
            upload([token], self._line[slot, :1])
            self._counts[slot] = 1
        self._backlog.join()

    def _feed(self, batch: int, window: int, prompts: Packed) -> None:
        """Run the model over what is in no cache yet, masks behind it. A slot without any has masks alone."""
        if not batch:
            assert self._runs is not None
            alone = beside(0, prompts)
            prompts_call(self._engines["draft"], self._cache, self._runs, alone, self._logits).run()
            return
        query, counts = self.window + 1 + max(0, window - 1), self._counts[:batch]
        line = self._line[:batch, :query]
        ids = self._token_ids.view(batch, query)
        write_masked(ids, line, self._mask)
        index = self._index[:batch]
        torch.add(self._state.view("length", batch), counts * -1, out=index)
        torch.add(index, 1, out=index)
        scored = max(1, window)  # a paged decoder scores at least one row, whether anybody reads it
        self._score_from(counts, scored, query)
        if prompts == NO_PROMPTS:
            self._run_call(batch, scored, query).run()
            return
        assert self._runs is not None
        sizes = beside(batch * query, prompts)
        self._runs.windows(batch, query, sizes).copy_(ids)
        self._packed_call(batch, scored, query, sizes).run()

    def _bind_run(self, batch: int, scored: int, query: int) -> Call:
        rows = self._score_rows.view(batch, scored)
        return self._bind_windows(self._token_ids.view(batch, query), rows, self._index[:batch])

    def _bind_packed(self, batch: int, scored: int, query: int, prompts: Packed) -> Call:
        assert self._runs is not None
        tokens, rows = self._runs.token_ids(batch * query, prompts), self._score_rows.view(batch, scored)
        return self._bind_windows(tokens, rows, self._index[:batch], self._runs.bindings(prompts))
