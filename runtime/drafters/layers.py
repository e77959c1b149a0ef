"""Drafts from layers that predict further and further on, a token each: MTP with several layers."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.calls import NO_PROMPTS, Packed, beside
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.drawing import StepwiseDrafter
from tandemrt.runtime.drafters.kept_pairs import KeptPairs
from tandemrt.runtime.drafters.pairs import PairDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.prompt_calls import MOST_PACKED, prefill_call, prompts_call
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.runs import PromptRuns


class LayersDrafter(PairDrafter, StepwiseDrafter):
    """Layer k, counted from 1, is fed token j + k of a text with what layer k - 1 gives of place j, at place j of its
    own cache; layer 1 with the target's state. It drafts the k-th token of a window, the last layer all further ones.

    So what layer k holds of the last k - 1 places was made with tokens that were drafted, or not known. All layers run
    over these places again, in front of the pairs that the last round made certain: of every text, that many pairs
    are kept, one less than there are layers.

    ``caches`` are the layers'; ``runs`` the prompts of each over a paged cache, those of its resources the first's.
    """

    def __init__(
        self,
        resources: DraftResources,
        *,
        caches: Sequence[Cache],
        runs: Sequence[PromptRuns],
        query: int,
        chunk: int,
    ) -> None:
        self._kept = kept = len(caches) - 1
        super().__init__(resources, query=query, chunk=chunk, kept=kept)
        device, dtype, slots, window = self._device, self._dtype, resources.slots, resources.window
        self.caches = tuple(caches)
        self._layers = [self._engines[name] for name in DRAFT_LAYERS[: len(caches)]]
        self._capturable = self._capturable and all(layer.capturable for layer in self._layers)
        self._layer_runs = runs
        self._pairs = KeptPairs(self._pair_tokens, self._pair_states, self._counts, kept=kept, query=window + 1)
        self._backlog = Backlog(1)  # every round feeds what the last one made certain
        most = max(self._fused.device.numel() // self._hidden, slots * self._most_pairs)
        self._made_states = [Buffer((most, self._hidden), dtype, device) for _ in range(2)]  # of odd and even layers
        self._own_states = [Buffer((slots, 1, self._hidden), dtype, device) for _ in range(2)]  # of steps likewise
        # Tokens of a run of the first layer, and what was drafted behind them, which further layers are fed.
        self._line = torch.zeros(slots, self._most_pairs + kept, dtype=torch.int64, device=device)
        self._last_rows = torch.zeros(slots, dtype=torch.int64, device=device)
        self._wide = Buffer((chunk + slots * len(DRAFT_LAYERS),), torch.int64, device)
        self._chunks: dict[int, tuple[slice, list[int]]] = {}  # by slot: the places in a call, tokens of its last pairs
        self._line_starts = cache(self._first_of_lines)
        self._layer_call = cache(self._bind_layer)
        self._step_call = cache(self._bind_step)
        self._layer_prompts = lru_cache(MOST_PACKED)(self._bind_layer_prompts)

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        self._pairs.forget(running.slot)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        super().leave(slot)
        self._pairs.forget(slot)
        self._chunks.pop(slot, None)  # whoever leaves within a round leaves nothing

    def held(self, running: Running) -> int:
        """See Drafter.held. What stands in front of the places that are fed again."""
        return max(0, super().held(running) - self._kept)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill. Each layer token by token behind those that it is fed with."""
        (slots, count), depth = tokens.shape, len(self._layers)
        features = self._buffers.prompt_features
        assert features is not None
        wide = self._wide.view(slots, count + depth)
        wide[:, :count] = tokens
        upload([[*behind, *[0] * depth][:depth] for behind in following], wide[:, count:])
        fused = self._fused.view(slots * count, self._hidden)
        self._engines["fuse"].bind({"features": features.view(slots * count, self._features), "states": fused}).run()
        states = fused.view(slots, count, self._hidden)
        length = self._state.view("length", slot + slots)[slot:]
        for at, layer in enumerate(self._layers):
            shifted = self._chunk_tokens.view(slots, count)
            shifted.copy_(wide[:, at + 1 : at + 1 + count])
            made = self._made_states[at % 2].view(slots, count, self._hidden)
            others = {"states": states, "next_states": made}
            prefill_call(layer, self.caches[at], slot, shifted, length, self._logits, others).run()
            states = made
        for each in range(slots):
            pairs = wide[each, 1 : count + 1].tolist()[-self._kept :]
            self._pairs.carry(slot + each, pairs, self._fused.view(slots, count, self._hidden)[each])
            if len(following[each]) > 1:  # more of the prompt follows: a round meanwhile must not feed these again
                self._pairs.hide(slot + each)
        self._backlog.join()

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.reads."""
        for at, runs in enumerate(self._layer_runs):
            runs.write(chunks, texts, sizes, ahead=at + 1)
        self._chunks, begin = {}, 0
        for slot, start, end in chunks:
            last = list(texts[slot][max(start, end - self._kept) + 1 : end + 1])
            self._chunks[slot], begin = (slice(begin, begin + end - start), last), begin + end - start
            self._pairs.hide(slot)

    def scored(self, this: Round) -> None:
        """See Drafter.scored. States are made of all features, those of prompts are fed to all layers."""
        tokens, prompts = this.windows if this.batch else 0, this.prompts
        self._fuse_call(tokens + prompts.prompt_tokens).run()
        if prompts == NO_PROMPTS:
            return
        sizes = beside(0, prompts)
        for at, name in enumerate(DRAFT_LAYERS[: len(self._layers)]):
            call = self._layer_prompts(at, tokens, sizes)
            self._graphs.run_with_prompts(
                (name, tokens, sizes), call.run, call, tokens=sizes.prompt_tokens, capturable=self._capturable
            )
        fused = self._fused.view(tokens + prompts.prompt_tokens, self._hidden)[tokens:]
        for slot, (places, last) in self._chunks.items():
            self._pairs.carry(slot, last, fused[places])

    def verified(self, this: Round) -> None:
        """See Drafter.verified. Behind what is kept stands what was emitted, with the states that the target gave."""
        batch, query = this.batch, this.window + 1
        self._backlog.emitted(this)
        tokens, states = self._buffers.tokens.view(batch, query), self._fused.view(batch, query, self._hidden)
        self._pairs.emitted(tokens, states, self._buffers.count.view(batch))

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of each layer over the pairs, further ones of the last, and one draw a token."""
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs, outputs = self._proposal(this)
        self._backlog.feed()

        def work() -> None:
            torch.add(self._state.view("length", batch), self._steps, out=self._index[:, :batch])
            self._begin(batch)
            keep_probs = draft_probs is not None
            self._draw(batch, window, lambda step: self._step(batch, step), keep_probs=keep_probs, filters=filters)
            for at in range(window, len(self._layers)):  # which nobody draws from, and go on from here later
                self._layer(batch, at, window)

        self._run(("propose", batch, window, draft_probs is None, filters), work, outputs)
        return draft_probs

    def _feed(self, batch: int, window: int) -> None:
        """See PairDrafter._feed."""
        self._begin(batch)
        for at in range(len(self._layers)):
            self._layer(batch, at, window)

    def _begin(self, batch: int) -> None:
        """Say what the runs of the layers begin with."""
        query, counts = self._most_pairs, self._counts[:batch]
        self._begin_first(batch, query)
        rows = self._score_rows.view(batch, 1)
        torch.clamp(counts[:, None], min=1, out=rows)
        torch.add(rows, self._starts(batch, query) + -1, out=rows)
        torch.add(self._line_starts(batch, query)[:, 0], counts, out=self._last_rows[:batch])
        torch.add(self._last_rows[:batch], -1, out=self._last_rows[:batch]).clamp_(min=0)
        self._line.zero_()
        torch.clamp(self._pair_tokens[:batch, :query], min=0, out=self._line[:batch, :query])

    def _layer(self, batch: int, at: int, drafted: int) -> None:
        """Run layer ``at``, counted from 0, over the pairs; of the window ``drafted`` tokens are drawn."""
        query, width = self._most_pairs, self._line.shape[1]
        if 0 < at <= drafted:
            places = self._line_starts(batch, width)[:, 0] + self._counts[:batch] + (at - 1)
            self._line.view(-1).index_copy_(0, places, self._tokens[at - 1, :batch])
        self._first_tokens.view(batch, query).copy_(self._line[:batch, at : at + query])
        self._layer_call(batch, at).run()

    def _step(self, batch: int, step: int) -> None:
        """Make the logits of a ``step``: by its own layer, or by the last one with the state that it made itself."""
        depth = len(self._layers)
        if step < depth:
            self._layer(batch, step, step)
            return
        if step == depth:
            made = self._made_states[(depth - 1) % 2].view(batch * self._most_pairs, self._hidden)
            own = self._own_states[step % 2].view(batch, self._hidden)
            torch.index_select(made, 0, self._last_rows[:batch], out=own)
        self._step_call(batch, step).run()

    def _bind_layer(self, batch: int, at: int) -> Call:
        tokens, rows = self._first_tokens.view(batch, self._most_pairs), self._score_rows.view(batch, 1)
        given = self._made_states[(at - 1) % 2] if at else self._first_states
        return self._bind_of(at, tokens, rows, self._first_index[:batch], given, self._made_states[at % 2])

    def _bind_step(self, batch: int, step: int) -> Call:
        given, made = self._own_states[step % 2], self._own_states[(step + 1) % 2]
        tokens, index = self._tokens[step - 1, :batch, None], self._index[step - len(self._layers) + 1, :batch]
        return self._bind_of(len(self._layers) - 1, tokens, self._starts(batch, 1), index, given, made)

    def _bind_of(
        self, at: int, tokens: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, given: Buffer, made: Buffer
    ) -> Call:
        """The call of layer ``at`` over ``tokens`` [batch, query] from ``index`` on, one row of each scored."""
        return self._layers[at].bind(
            {
                "token_ids": tokens if self._runs is None else tokens.reshape(-1),
                "states": self._fed(given, tokens),
                "next_states": self._fed(made, tokens),
                "score_rows": rows,
                "write_index": index,
                "logits": self._logits.view(len(tokens), 1, self._width),
                **self.caches[at].rows(0, len(tokens)),
            }
        )

    def _bind_layer_prompts(self, at: int, behind: int, prompts: Packed) -> Call:
        """The call of layer ``at`` for a round's prompts, whose states stand behind those of ``behind`` tokens."""
        count = prompts.prompt_tokens
        if at:
            given = self._made_states[(at - 1) % 2].view(count, self._hidden)
        else:
            given = self._fused.view(behind + count, self._hidden)[behind:]
        others = {"states": given, "next_states": self._made_states[at % 2].view(count, self._hidden)}
        return prompts_call(self._layers[at], self.caches[at], self._layer_runs[at], prompts, self._logits, others)

    def _first_of_lines(self, batch: int, width: int) -> torch.Tensor:
        """int64 [batch, 1]: 0, width, 2 * width, …"""
        return torch.tensor([[width * row] for row in range(batch)], dtype=torch.int64, device=self._device)
