"""Drafts from a model that foresees a whole window in one run, behind mask tokens: PARD.

An, Bai et al., "PARD" (arXiv 2504.18583).
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.calls import NO_PROMPTS, Packed, beside
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, Engine
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.at_once import AtOnceDrafter
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.runs import PromptRuns
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import MOST_PACKED, prefill_call, prompts_call


class ParallelDrafter(AtOnceDrafter):
    """Runs the draft model once a round, over the tokens that the last round emitted and ``window`` - 1 mask tokens.

    The last token and every mask behind it foresee one token each, which are drawn at once. What masks have written
    into the cache is written again by the next round: of drafted tokens that were accepted no state is kept.

    A round that drafts nothing feeds what was emitted, too. Over a paged cache, a round's prompts ride along.

    ``engines`` holds "draft", "propose" and "propose_probs"; ``mask_token`` is what the model was trained with;
    ``runs`` are the prompts of a round over a paged cache, None over a linear one; ``reach``: see Drafter.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        buffers: RoundBuffers,
        state: SlotState,
        kv: Cache,
        graphs: Graphs,
        runs: PromptRuns | None,
        *,
        mask_token: int,
        reach: int,
        slots: int,
        window: int,
    ) -> None:
        super().__init__(engines, buffers, state, kv, graphs, slots=slots, window=window, reach=reach)
        device = self._device
        self._runs = runs
        self._mask = mask_token
        # Tokens of each slot that are in no cache yet, and -1 behind them: `_counts` of them up to `length`.
        self._line = torch.zeros(slots, 2 * window, dtype=torch.int64, device=device).fill_(-1)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._query = 1  # tokens that any slot may have
        self._rows = torch.arange(slots, device=device)[:, None]
        self._index = torch.zeros(slots, dtype=torch.int64, device=device)
        self._token_ids = Buffer((slots, 2 * window), torch.int64, device)
        self._score_rows = Buffer((slots, window), torch.int64, device)
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
        """See Drafter.held. What a round emitted is fed when the next one begins."""
        return len(running.tokens) - 1

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        """See Drafter.prefill."""
        length = self._state.view("length", slot + len(tokens))[slot:]
        prefill_call(self._engines["draft"], self._cache, slot, tokens, length, self._logits).run()
        self._expect(range(slot, slot + len(tokens)), following)

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.reads."""
        self._expect([chunk.slot for chunk in chunks], [texts[chunk.slot][chunk.end] for chunk in chunks])

    def skip(self, this: Round) -> None:
        """See Drafter.skip. What its rows have is fed."""
        batch, prompts = this.batch, this.prompts
        if prompts != NO_PROMPTS:
            self._graphs.run_eagerly(lambda: self._feed(batch, 0, prompts), "prompts")
        elif batch:
            self._run(("feed", batch, self._query), lambda: self._feed(batch, 0, prompts), [])

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled. Of drafted tokens no cache keeps anything."""

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw."""
        batch, window, filters, prompts = this.batch, this.window, this.filters, this.prompts
        draft_probs, outputs = self._proposal(this)

        def work() -> None:
            self._feed(batch, window, prompts)
            self._draw(batch, window, keep_probs=draft_probs is not None, filters=filters)

        if prompts != NO_PROMPTS:
            self._graphs.run_eagerly(work, "prompts")
        else:
            self._run(("propose", batch, window, self._query, draft_probs is None, filters), work, outputs)
        return draft_probs

    def verified(self, this: Round) -> None:
        """See Drafter.verified."""
        batch, query = this.batch, this.window + 1
        self._line[:batch, :query] = self._buffers.tokens.view(batch, query)
        self._line[:batch, query:] = -1
        self._counts[:batch].copy_(self._buffers.count.view(batch))
        self._query = query

    def _expect(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The token that the next round feeds is the only one of these slots."""
        for slot, token in zip(slots, tokens, strict=True):
            self._line[slot] = -1
            upload([token], self._line[slot, :1])
            self._counts[slot] = 1

    def _feed(self, batch: int, window: int, prompts: Packed) -> None:
        """Run the model over what is in no cache yet, masks behind it. A slot without any has masks alone."""
        if not batch:
            assert self._runs is not None
            alone = beside(0, prompts)
            prompts_call(self._engines["draft"], self._cache, self._runs, alone, self._logits).run()
            return
        query, counts = self._query + max(0, window - 1), self._counts[:batch]
        line = self._line[:batch, :query]
        ids = self._token_ids.view(batch, query)
        torch.clamp(line, max=0, out=ids)  # 0 for a token, -1 where a mask stands
        torch.add(line, ids * -(self._mask + 1), out=ids)
        index = self._index[:batch]
        torch.add(self._state.view("length", batch), counts * -1, out=index)
        torch.add(index, 1, out=index)
        scored = max(1, window)  # a paged decoder scores at least one row, whether anybody reads it
        rows = self._score_rows.view(batch, scored)
        torch.add(counts[:, None], self._steps[:scored], out=rows)
        torch.add(rows, -1, out=rows).clamp_(min=0)
        if self._runs is not None:  # rows are counted from the first token of the call
            torch.add(rows, self._rows[:batch] * query, out=rows)
        if prompts == NO_PROMPTS:
            self._run_call(batch, scored, query).run()
            return
        assert self._runs is not None
        sizes = beside(batch * query, prompts)
        self._runs.windows(batch, query, sizes).copy_(ids)
        self._packed_call(batch, scored, query, sizes).run()

    def _bind_run(self, batch: int, scored: int, query: int) -> Call:
        ids = self._token_ids.view(batch, query)
        tokens = ids if self._runs is None else ids.reshape(-1)
        return self._engines["draft"].bind(self._given(batch, scored) | {"token_ids": tokens})

    def _bind_packed(self, batch: int, scored: int, query: int, prompts: Packed) -> Call:
        assert self._runs is not None
        tokens = {"token_ids": self._runs.token_ids(batch * query, prompts)}
        return self._engines["draft"].bind(self._given(batch, scored) | self._runs.bindings(prompts) | tokens)

    def _given(self, batch: int, scored: int) -> dict[str, torch.Tensor]:
        """The bindings of a run for slots [0, batch), without prompts, but its tokens."""
        return {
            "score_rows": self._score_rows.view(batch, scored),
            "write_index": self._index[:batch],
            "logits": self._logits.view(batch, scored, self._vocab),
            **self._cache.rows(0, batch),
        }
