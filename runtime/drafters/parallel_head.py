"""Drafts from a head that reads the target's states and foresees a whole window in one run: P-EAGLE.

"P-EAGLE" (arXiv 2602.01469).
"""

from functools import cache

from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.at_once import AtOnceDrafter, write_masked
from tandemrt.runtime.drafters.pairs import PairDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.round import Round


class ParallelHeadDrafter(PairDrafter, AtOnceDrafter):
    """Runs a head once a round, over the pairs that the last round made certain and ``window`` - 1 mask tokens, whose
    state the head knows by itself.

    The last pair and every mask behind it foresee one token each. What masks have written into the cache is written
    again by the next round. ``mask_token`` is what the head was trained with.
    """

    def __init__(self, resources: DraftResources, *, mask_token: int, query: int, chunk: int) -> None:
        super().__init__(resources, query=query, chunk=chunk)
        self._mask = mask_token
        self._run_call = cache(self._bind_run)

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the head and one draw."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)
        self._backlog.feed()

        def work() -> None:
            self._feed(batch, window)
            self._draw(batch, window, keep_probs=draft_probs is not None, filters=filters)

        self._run(("propose", batch, window, draft_probs is None, filters), work, outputs)
        return draft_probs

    def _feed(self, batch: int, window: int) -> None:
        """See PairDrafter._feed. A slot without pairs has masks alone."""
        scored, counts = max(1, window), self._counts[:batch]
        query = self._most_pairs + scored - 1
        self._begin_first(batch, query)
        line, ids = self._pair_tokens[:batch, :query], self._first_tokens.view(batch, query)
        write_masked(ids, line, self._mask)
        self._score_from(counts, scored, query)
        self._run_call(batch, scored, query).run()

    def _bind_run(self, batch: int, scored: int, query: int) -> Call:
        tokens, rows = self._first_tokens.view(batch, query), self._score_rows.view(batch, scored)
        others = {"states": self._fed(self._first_states, tokens)}
        return self._bind_windows(tokens, rows, self._first_index[:batch], others)
