"""Drafts from a model that foresees a whole window in one run, behind mask tokens: PARD.

An, Bai et al., "PARD" (arXiv 2504.18583).
"""

from collections.abc import Sequence
from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, Engine
from tandemrt.runtime.caches.kv_cache import Cache, windows
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.drawing import DrawingDrafter
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import prefill_call


class ParallelDrafter(DrawingDrafter):
    """Runs the draft model once a round, over the tokens that the last round emitted and ``window`` - 1 mask tokens.

    The last token and every mask behind it foresee one token each, which are drawn at once. What masks have written
    into the cache is written again by the next round: of drafted tokens that were accepted no state is kept.

    A round that drafts nothing feeds what was emitted, too.

    ``engines`` holds "draft", "propose" and "propose_probs"; ``mask_token`` is what the model was trained with;
    ``reach``: see Drafter.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        buffers: RoundBuffers,
        state: SlotState,
        kv: Cache,
        graphs: Graphs,
        *,
        mask_token: int,
        reach: int,
        slots: int,
        window: int,
    ) -> None:
        super().__init__(engines, buffers, state, kv, graphs, slots=slots, window=window, reach=reach)
        device = self._device
        self._mask = mask_token
        # Tokens of each slot that are in no cache yet, and -1 behind them: `_counts` of them up to `length`.
        self._line = torch.zeros(slots, 2 * window, dtype=torch.int64, device=device).fill_(-1)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._query = 1  # tokens that any slot may have
        self._steps = torch.arange(window, device=device)
        self._index = torch.zeros(slots, dtype=torch.int64, device=device)
        self._first_row = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self._token_ids = Buffer((slots, 2 * window), torch.int64, device)
        self._score_rows = Buffer((slots, window), torch.int64, device)
        self._logits = Buffer((slots, window, self._vocab), self._dtype, device)
        self._sampling = {
            name: Buffer((slots, window), torch.float32 if name in SlotState.FLOATS else torch.int64, device)
            for name in state.sampling(0)
        }
        self._run_call = cache(self._bind_run)
        self._draw_call = cache(self._bind_draw)
        self._rows_of = cache(self._slots_of_rows)

    def join(self, running: Running) -> None:
        """See SlotListener.join. Whatever is prefilled, the last token is fed by the first round."""
        self._expect([running.slot], [running.tokens[-1]])

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._expect([slot], [0])

    def held(self, running: Running) -> int:
        """See Drafter.held. What a round emitted is fed when the next one begins."""
        return len(running.tokens) - 1

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        """See Drafter.prefill."""
        length = self._state.view("length", slot + len(tokens))[slot:]
        prefill_call(self._engines["draft"], self._cache, slot, tokens, length, self._logits).run()
        self._expect(range(slot, slot + len(tokens)), following)

    def skip(self, this: Round) -> None:
        """See Drafter.skip. What its rows have is fed."""
        if this.batch:
            self._run(("feed", this.batch, self._query), lambda: self._feed(this.batch, 0), [])

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled. Of drafted tokens no cache keeps anything."""

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)

        def work() -> None:
            self._feed(batch, window)
            for name, values in self._state.drafting(batch).items():
                torch.index_select(values, 0, self._rows_of(batch, window), out=self._repeated(name, batch, window))
            position = self._sampling["position"].view(batch, window)
            torch.add(position, self._steps[:window], out=position)
            self._draw_call(batch, window, draft_probs is not None, filters).run()

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

    def _feed(self, batch: int, window: int) -> None:
        """Run the model over what is in no cache yet, masks behind it. A slot without any has masks alone."""
        query, counts = self._columns(window), self._counts[:batch]
        line = self._line[:batch, :query]
        ids = self._token_ids.view(batch, query)
        torch.clamp(line, max=0, out=ids)  # 0 for a token, -1 where a mask stands
        torch.add(line, ids * -(self._mask + 1), out=ids)
        index = self._index[:batch]
        torch.add(self._state.view("length", batch), counts * -1, out=index)
        torch.add(index, 1, out=index)
        if window:
            rows = self._score_rows.view(batch, window)
            torch.add(counts[:, None], self._steps[:window], out=rows)
            torch.add(rows, -1, out=rows).clamp_(min=0)
        self._run_call(batch, window, query).run()

    def _columns(self, window: int) -> int:
        """Tokens per row of a run that drafts ``window``."""
        return self._query + max(0, window - 1)

    def _repeated(self, name: str, batch: int, window: int) -> torch.Tensor:
        return self._sampling[name].view(batch * window)

    def _slots_of_rows(self, batch: int, window: int) -> torch.Tensor:
        """int64 [batch * window]: 0, 0, …, 1, 1, …"""
        slots = [slot for slot in range(batch) for _ in range(window)]
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def _bind_run(self, batch: int, window: int, query: int) -> Call:
        draft, rows = self._engines["draft"], max(1, window)
        score_rows = self._score_rows.view(batch, window) if window else self._first_row[:batch]
        return draft.bind(
            {
                **windows(draft.contract, self._token_ids.view(batch, query), score_rows),
                "write_index": self._index[:batch],
                "logits": self._logits.view(batch, rows, self._vocab),
                **self._cache.rows(0, batch),
            }
        )

    def _bind_draw(self, batch: int, window: int, keep_probs: bool, filters: bool) -> Call:
        rows = batch * window
        tensors = {name: self._repeated(name, batch, window) for name in self._sampling} | {
            "logits": self._logits.view(rows, 1, self._vocab),
            "token": self._buffers.draft_tokens.view(rows),
        }
        probs = self._draft_probs.view(rows, self._vocab) if keep_probs else None
        return self._bind_law(tensors, probs, filters=filters)
