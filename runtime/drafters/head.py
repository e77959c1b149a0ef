"""Drafts from a head that reads the target's states, one token at a time: EAGLE-3, MTP."""

from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.drawing import StepwiseDrafter
from tandemrt.runtime.drafters.pairs import PairDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.round import Round


class HeadDrafter(PairDrafter, StepwiseDrafter):
    """Runs a head ``window`` times per round and draws each token as the request would.

    The first run of a round takes the pairs that the last round made certain, as many as it emitted tokens; behind them
    every drafted token goes with the state that the head itself made, at places that the next round writes again.
    """

    def __init__(self, resources: DraftResources, *, query: int, chunk: int) -> None:
        super().__init__(resources, query=query, chunk=chunk)
        # Row r > 0 of `_index` holds length + r - 1: where step r writes. Row 0 is not read.
        self._behind = cache(lambda batch, query: self._starts(batch, query) + -1)
        own = (resources.slots, 1, self._hidden)
        self._own_states = [Buffer(own, self._dtype, self._device) for _ in range(2)]  # of even and odd steps
        self._first_call = cache(self._bind_first)
        self._step_call = cache(self._bind_step)

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the head and one draw per drafted token."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)
        self._backlog.feed()

        def work() -> None:
            self._chain(batch, window, keep_probs=draft_probs is not None, filters=filters)

        self._run(("propose", batch, window, draft_probs is None, filters), work, outputs)
        return draft_probs

    def _chain(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        torch.add(self._state.view("length", batch), self._steps, out=self._index[:, :batch])
        self._feed(batch, window)

        def run(step: int) -> None:
            if step:
                self._step_call(batch, step).run()

        self._draw(batch, window, run, keep_probs=keep_probs, filters=filters)

    def _feed(self, batch: int, window: int) -> None:  # noqa: ARG002
        """See PairDrafter._feed. What stands behind the pairs is written again."""
        query, counts = self._most_pairs, self._counts[:batch]
        self._begin_first(batch, query)
        rows = self._score_rows.view(batch, 1)
        torch.clamp(counts[:, None], min=1, out=rows)
        torch.add(rows, self._behind(batch, query), out=rows)
        torch.clamp(self._pair_tokens[:batch, :query], min=0, out=self._first_tokens.view(batch, query))
        self._first_call(batch, query).run()

    def _made(self, *shape: int) -> dict[str, torch.Tensor]:
        return {"next_states": self._own_states[0].view(*shape, self._hidden)}

    def _bind_first(self, batch: int, query: int) -> Call:
        tokens, rows = self._first_tokens.view(batch, query), self._score_rows.view(batch, 1)
        others = {"states": self._fed(self._first_states, tokens), **self._made(batch, 1)}
        return self._bind_windows(tokens, rows, self._first_index[:batch], others)

    def _bind_step(self, batch: int, step: int) -> Call:
        given, made = self._own_states[(step - 1) % 2], self._own_states[step % 2]
        tokens = self._tokens[step - 1, :batch, None]
        others = {"states": self._fed(given, tokens), "next_states": made.view(batch, 1, self._hidden)}
        return self._bind_windows(tokens, self._starts(batch, 1), self._index[step, :batch], others)
