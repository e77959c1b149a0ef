"""Drafts from a head that reads the target's states, with a cache of its own: EAGLE-3."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.calls import NO_PROMPTS, Packed, beside
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, Engine, prompt_rows
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.drawing import StepwiseDrafter
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.runs import PromptRuns
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import MOST_PACKED, prompts_call


class HeadDrafter(StepwiseDrafter):
    """Runs a head ``window`` times per round and draws each token as the request would.

    The head is fed pairs: token j + 1 of a text with the target's state of token j, at place j of its cache. The first
    run of a round takes the pairs that the last round made certain, as many as it emitted tokens; behind them every
    drafted token goes with the state that the head itself made, at places that the next round writes again. So its
    cache holds what the target's states make of a text, and nothing else is read.

    A round that drafts nothing feeds its pairs, too: their states are kept for one round only.

    Over a paged cache, prompts are fed behind the target's call of the round, which gives their states; one that ends
    in a round is drafted for from the next one on.

    ``engines`` holds "draft", "fuse", "propose" and "propose_probs". ``runs`` are the prompts of a round over a paged
    cache, None over a linear one, where ``chunk`` bounds the prompt tokens of a call.
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
        slots: int,
        window: int,
        chunk: int,
    ) -> None:
        # A bundle's texts are no longer than what its head reaches.
        super().__init__(engines, buffers, state, kv, graphs, slots=slots, window=window, reach=None)
        device, dtype = self._device, self._dtype
        self._runs = runs
        self._hidden = int(engines["draft"].contract["states"].shape[-1])
        self._features = int(engines["fuse"].contract["features"].shape[-1])
        query = window + 1
        # Pairs of each slot that are in no cache yet, `_counts` of them behind `length` - `_counts`.
        self._pair_tokens = torch.zeros(slots, query, dtype=torch.int64, device=device)
        self._pair_states = torch.zeros(slots, query, self._hidden, dtype=dtype, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._query = 1  # pairs that any slot may have
        # Row 0 of `_index`: where the first run begins. Row r > 0 holds length + r - 1: where step r writes.
        self._rows = torch.arange(slots, device=device)
        self._first_tokens = Buffer((slots, query), torch.int64, device)
        self._first_states = Buffer((slots, query, self._hidden), dtype, device)
        self._own_states = [Buffer((slots, 1, self._hidden), dtype, device) for _ in range(2)]  # of even and odd steps
        features = buffers.features
        assert features is not None
        self._fused = Buffer((max(features.device.numel() // self._features, chunk), self._hidden), dtype, device)
        self._chunk_tokens = Buffer((chunk,), torch.int64, device)
        self._following = Buffer((slots,), torch.int64, device)
        self._first_call = cache(self._bind_first)
        self._step_call = cache(self._bind_step)
        self._fuse_call = lru_cache(MOST_PACKED)(self._bind_fuse)
        self._prompts_call = lru_cache(MOST_PACKED)(self._bind_prompts)

    def join(self, running: Running) -> None:
        """See SlotListener.join. A text of one token has no pair yet, so that nothing sensible is drafted behind it."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._counts[slot] = 0

    def held(self, running: Running) -> int:
        """See Drafter.held. What a round emitted is fed when the next one begins."""
        return len(running.tokens) - 1

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        """See Drafter.prefill. Token by token behind the one that it is paired with."""
        (slots, count), head = tokens.shape, self._engines["draft"]
        features = self._buffers.prompt_features
        assert features is not None
        last = self._following.view(slots)
        upload(list(following), last)
        shifted = self._chunk_tokens.view(slots, count)
        shifted[:, : count - 1] = tokens[:, 1:]
        shifted[:, count - 1] = last
        states = self._fused.view(slots, count, self._hidden)
        self._engines["fuse"].bind(
            {
                "features": features.view(slots * count, self._features),
                "states": self._fused.view(slots * count, self._hidden),
            }
        ).run()
        rows = prompt_rows(head)
        head.bind(
            {
                "token_ids": shifted,
                "states": states,
                "write_index": self._state.view("length", slot + slots)[slot:],
                "score_rows": torch.zeros(slots, rows, dtype=torch.int64, device=head.device),
                "logits": self._logits.view(slots, rows, self._vocab),
                "next_states": self._own_states[0].view(slots, rows, self._hidden),
                **self._cache.rows(slot, slots),
            }
        ).run()
        # The newest pair decides the first drafted token, so it is fed once more.
        self._pair_tokens[slot : slot + slots, 0] = last
        self._pair_states[slot : slot + slots, 0] = states[:, count - 1]
        self._counts[slot : slot + slots] = 1

    def skip(self, this: Round) -> None:
        """See Drafter.skip. The pairs of its rows are fed."""
        if this.batch:
            self._run(("feed", this.batch, self._query), lambda: self._feed(this.batch), [])

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled. Of drafted tokens no cache keeps anything."""

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the head and one draw per drafted token."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)

        def work() -> None:
            self._chain(batch, window, keep_probs=draft_probs is not None, filters=filters)

        self._run(("propose", batch, window, self._query, draft_probs is None, filters), work, outputs)
        return draft_probs

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.reads. Token by token behind the one that it is paired with."""
        assert self._runs is not None
        self._runs.write(chunks, texts, sizes, ahead=1)

    def scored(self, this: Round) -> None:
        """See Drafter.scored. States are made of all features, those of prompts are fed."""
        tokens, prompts = this.windows if this.batch else 0, this.prompts
        self._fuse_call(tokens + prompts.prompt_tokens).run()
        if prompts != NO_PROMPTS:
            sizes = beside(0, prompts)
            call = self._prompts_call(tokens, sizes)
            self._graphs.run_with_prompts(
                ("draft", tokens, sizes), call.run, call, tokens=sizes.prompt_tokens, capturable=self._capturable
            )

    def verified(self, this: Round) -> None:
        """See Drafter.verified. What was emitted is paired with the states that the target computed for the window."""
        batch, query = this.batch, this.window + 1
        self._pair_states[:batch, :query] = self._fused.view(batch, query, self._hidden)
        self._pair_tokens[:batch, :query] = self._buffers.tokens.view(batch, query)
        self._counts[:batch].copy_(self._buffers.count.view(batch))
        self._query = query

    def _chain(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        torch.add(self._state.view("length", batch), self._steps, out=self._index[:, :batch]).clamp_(min=0)
        self._feed(batch)

        def run(step: int) -> None:
            if step:
                self._step_call(batch, step).run()

        self._draw(batch, window, run, keep_probs=keep_probs, filters=filters)

    def _feed(self, batch: int) -> None:
        """The first run of a round: the pairs that are in no cache yet, and what stands behind them is written again.

        A slot without any writes behind its text.
        """
        query, counts = self._query, self._counts[:batch]
        torch.add(self._state.view("length", batch), counts * -1, out=self._index[0, :batch]).clamp_(min=0)
        torch.add(counts, -1, out=self._score_rows.view(batch)).clamp_(min=0)
        tokens = self._first_tokens.view(batch, query)  # behind what was emitted stands -1
        torch.clamp(self._pair_tokens[:batch, :query], min=0, out=tokens)
        self._first_states.view(batch, query, self._hidden).copy_(self._pair_states[:batch, :query])
        if self._runs is not None:  # rows that get logits are counted from the first token of the call
            rows = self._score_rows.view(batch)
            torch.add(rows, self._rows[:batch] * query, out=rows)
        self._first_call(batch, query).run()

    def _bind_first(self, batch: int, query: int) -> Call:
        return self._engines["draft"].bind(
            {
                **self._fed(self._first_tokens.view(batch, query), self._first_states, self._score_rows.view(batch, 1)),
                "write_index": self._index[0, :batch],
                "logits": self._logits.view(batch, 1, self._vocab),
                "next_states": self._own_states[0].view(batch, 1, self._hidden),
                **self._cache.rows(0, batch),
            }
        )

    def _bind_step(self, batch: int, step: int) -> Call:
        given, made = self._own_states[(step - 1) % 2], self._own_states[step % 2]
        return self._engines["draft"].bind(
            {
                **self._fed(self._tokens[step - 1, :batch, None], given, self._first_row(batch)),
                "write_index": self._index[step, :batch],
                "logits": self._logits.view(batch, 1, self._vocab),
                "next_states": made.view(batch, 1, self._hidden),
                **self._cache.rows(0, batch),
            }
        )

    def _fed(self, tokens: torch.Tensor, states: Buffer, score_rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The bindings of ``tokens`` [batch, query] and the states they are fed with, in the form of the cache."""
        shape = tokens.shape if self._runs is None else (tokens.numel(),)
        return {
            "token_ids": tokens if self._runs is None else tokens.reshape(-1),
            "states": states.view(*shape, self._hidden),
            "score_rows": score_rows,
        }

    def _first_row(self, batch: int) -> torch.Tensor:
        """int64 [batch, 1]: the only token of each row."""
        return (self._only_row if self._runs is None else self._rows[:, None])[:batch]

    def _bind_fuse(self, tokens: int) -> Call:
        features = self._buffers.features
        assert features is not None
        return self._engines["fuse"].bind(
            {"features": features.view(tokens, self._features), "states": self._fused.view(tokens, self._hidden)}
        )

    def _bind_prompts(self, behind: int, prompts: Packed) -> Call:
        """The call of a round's prompts, whose states stand behind those of ``behind`` tokens of windows."""
        assert self._runs is not None
        states = self._fused.view(behind + prompts.prompt_tokens, self._hidden)[behind:]
        others = {"states": states, "next_states": self._own_states[0].view(1, 1, self._hidden)}
        return prompts_call(self._engines["draft"], self._cache, self._runs, prompts, self._logits, others)
