"""Drafts from a head that reads the target's states and foresees a whole window in one run: P-EAGLE.

"P-EAGLE" (arXiv 2602.01469).
"""

from functools import cache
from typing import Any

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.at_once import AtOnceDrafter
from tandemrt.runtime.drafters.pairs import PairDrafter
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.round import Round


class ParallelHeadDrafter(PairDrafter, AtOnceDrafter):
    """Runs a head once a round, over the pairs that the last round made certain and ``window`` - 1 mask tokens, whose
    state the head knows by itself.

    The last pair and every mask behind it foresee one token each. What masks have written into the cache is written
    again by the next round. ``mask_token`` is what the head was trained with.
    """

    def __init__(self, *given: Any, mask_token: int, slots: int, window: int, **sizes: Any) -> None:
        super().__init__(*given, slots=slots, window=window, **sizes)
        self._mask = mask_token
        self._score_rows = Buffer((slots, window), torch.int64, self._device)
        self._run_call = cache(self._bind_run)

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the head and one draw."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)

        def work() -> None:
            self._feed(batch, window)
            self._draw(batch, window, keep_probs=draft_probs is not None, filters=filters)

        self._run(("propose", batch, window, self._query, draft_probs is None, filters), work, outputs)
        return draft_probs

    def _feed(self, batch: int, window: int) -> None:
        """See PairDrafter._feed. A slot without pairs has masks alone."""
        scored, counts = max(1, window), self._counts[:batch]
        query = self._query + scored - 1
        self._begin_first(batch, query)
        line, ids = self._pair_tokens[:batch, :query], self._first_tokens.view(batch, query)
        torch.clamp(line, max=0, out=ids)  # 0 for a token, -1 where a mask stands
        torch.add(line, ids * -(self._mask + 1), out=ids)
        rows = self._score_rows.view(batch, scored)
        torch.add(counts[:, None], self._steps[:scored], out=rows)
        torch.add(rows, -1, out=rows).clamp_(min=0)
        if self._runs is not None:  # rows are counted from the first token of the call
            torch.add(rows, self._rows[:batch, None] * query, out=rows)
        self._run_call(batch, scored, query).run()

    def _bind_run(self, batch: int, scored: int, query: int) -> Call:
        rows = self._score_rows.view(batch, scored)
        return self._engines["draft"].bind(
            {
                **self._fed(self._first_tokens.view(batch, query), self._first_states, rows),
                "write_index": self._first_index[:batch],
                "logits": self._logits.view(batch, scored, self._vocab),
                **self._cache.rows(0, batch),
            }
        )
