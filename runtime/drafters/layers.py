"""MTP with several layers: each layer predicts one token further than the layer before it. Experimental."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed, repacked
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import MAX_PACKED_CALLS, CallLayout
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.caches.prompt_calls import linear_prefill_call, packed_prefill_call
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.kept_pairs import KeptPairs
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.pair_store import PairStore
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import StepSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class LayersDrafter(NullHooks):
    """Runs one layer per drafted token, and the last layer for all further tokens.

    Layer k (from 1) reads token j + k of a text and the state of position j from layer k - 1 (layer 1: of the target)
    and writes position j of its own cache. It drafts the k-th token of a window.

    So the last k - 1 positions in the cache of layer k depend on drafted or unknown tokens. Every round runs all layers
    over these positions again, before the new pairs. For this, the last pairs of each text are kept, one fewer than
    there are layers.
    """

    max_length: int | None = None

    def __init__(
        self,
        draft: DraftResources,
        pairs: PairStore,
        sampler: StepSampler,
        *,
        caches: Sequence[Cache],
        layouts: Sequence[CallLayout],
        chunk: int,
    ) -> None:
        """
        Args:
            draft: its cache and layout are those of the first layer.
            caches, layouts: of each layer.
            chunk: the most prompt tokens of a call over a linear cache.
        """
        self.window = draft.window
        self.reads_prompts_late = draft.layout.packed
        self.caches = tuple(caches)
        self._draft = draft
        self._pairs = pairs
        self._sampler = sampler
        self._kept = kept = len(caches) - 1
        self._layers = [draft.engines[name] for name in DRAFT_LAYERS[: len(caches)]]
        self._layouts = layouts
        self._kept_pairs = KeptPairs(pairs.tokens, pairs.states, pairs.counts, kept=kept, query=draft.window + 1)
        self._backlog = Backlog(1)  # every round processes the pairs of the last one
        device, dtype, slots, hidden = draft.device, draft.dtype, draft.slots, pairs.hidden
        most = max(pairs.fused.device.numel() // hidden, slots * pairs.most)
        self._layer_states = [Buffer((most, hidden), dtype, device) for _ in range(2)]  # of odd and even layers
        self._step_states = [Buffer((slots, 1, hidden), dtype, device) for _ in range(2)]  # of odd and even steps
        self._score_rows = Buffer((slots,), torch.int64, device)
        # Tokens of the first layer's run, then the drafted tokens, which further layers read.
        self._tokens = torch.zeros(slots, pairs.most + kept, dtype=torch.int64, device=device)
        self._last_rows = torch.zeros(slots, dtype=torch.int64, device=device)
        self._chunk_tokens = Buffer((chunk,), torch.int64, device)
        self._text = Buffer((chunk + slots * len(DRAFT_LAYERS),), torch.int64, device)
        self._chunks: dict[int, tuple[slice, list[int]]] = {}  # by slot: positions in a call, tokens of its last pairs
        self._line_starts = cache(self._make_line_starts)
        self._layer_call = cache(self._bind_layer)
        self._step_call = cache(self._bind_step)
        self._layer_prompts = lru_cache(MAX_PACKED_CALLS)(self._bind_layer_prompts)

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        self._kept_pairs.clear(running.slot)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._pairs.clear(slot)
        self._kept_pairs.clear(slot)
        self._chunks.pop(slot, None)  # so that ``after_target`` stores no pairs for the slot

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill. Each layer reads tokens one position further than the layer before it."""
        (slots, count), depth, hidden = tokens.shape, len(self._layers), self._pairs.hidden
        text = self._text.view(slots, count + depth)
        text[:, :count] = tokens
        upload([[*after, *[0] * depth][:depth] for after in following], text[:, count:])
        fused = states = self._pairs.fuse_prompts(slots, count)
        length = self._draft.state.view("length", slot + slots)[slot:]
        for at, layer in enumerate(self._layers):
            shifted = self._chunk_tokens.view(slots, count)
            shifted.copy_(text[:, at + 1 : at + 1 + count])
            next_states = self._layer_states[at % 2].view(slots, count, hidden)
            others = {"states": states, "next_states": next_states}
            linear_prefill_call(layer, self.caches[at], slot, shifted, length, self._sampler.logits, others).run()
            states = next_states
        for each in range(slots):
            pairs = text[each, 1 : count + 1].tolist()[-self._kept :]
            self._kept_pairs.carry(slot + each, pairs, fused[each])
            if len(following[each]) > 1:  # more of the prompt follows: rounds before it must not process these again
                self._kept_pairs.hide(slot + each)
        self._backlog.join()

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.write_prompts."""
        for at, layout in enumerate(self._layouts):
            layout.write(chunks, texts, sizes, ahead=at + 1)
        self._chunks, begin = {}, 0
        for slot, start, end in chunks:
            last = list(texts[slot][max(start, end - self._kept) + 1 : end + 1])
            self._chunks[slot], begin = (slice(begin, begin + end - start), last), begin + end - start
            self._kept_pairs.hide(slot)

    def skip(self, round_: Round) -> None:
        """See Drafter.skip. All layers process the pairs."""
        if round_.batch and not self._backlog.defer(round_):
            shape, draft = RoundShape(round_.batch, 0), self._draft

            def work() -> None:
                self._write_first(shape.batch)
                for at in range(len(self._layers)):
                    self._run_layer(shape.batch, at, 0)

            draft.graphs.run(("feed", shape), work, outputs=[], capturable=draft.capturable)

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose. One run of each layer over the pairs, further runs of the last."""
        shape, batch = round_.shape.without_prompts, round_.batch
        self._backlog.mark_processed()

        def work() -> None:
            self._sampler.sample(shape, lambda step: self._run_step(batch, step))
            drafted = self._draft.buffers.num_drafted
            for at in range(drafted, len(self._layers)):  # layers after the window still fill their caches
                self._run_layer(batch, at, drafted)

        return self._sampler.propose(round_, shape, work)

    def after_target(self, round_: Round) -> None:
        """See Drafter.after_target. Compute the states of all tokens."""
        tokens, prompts = round_.window_tokens, round_.prompts
        self._pairs.fuse(tokens + prompts.prompt_tokens)
        if prompts == NO_PROMPTS:
            return
        fused = self._pairs.fused.view(tokens + prompts.prompt_tokens, self._pairs.hidden)[tokens:]
        for slot, (positions, last) in self._chunks.items():
            self._kept_pairs.carry(slot, last, fused[positions])

    def after_verify(self, round_: Round) -> None:
        """See Drafter.after_verify. Append the emitted pairs to the kept ones."""
        batch, query, buffers = round_.batch, round_.window + 1, self._draft.buffers
        self._backlog.emitted(round_)
        states = self._pairs.fused.view(batch, query, self._pairs.hidden)
        self._kept_pairs.add_emitted(buffers.tokens.view(batch, query), states, buffers.count.view(batch))

    def read_prompts(self, round_: Round) -> None:
        """See Drafter.read_prompts. All layers process their states."""
        before, sizes = round_.window_tokens, repacked(0, round_.prompts)
        for at, name in enumerate(DRAFT_LAYERS[: len(self._layers)]):
            self._draft.run_prompts((name, before, sizes), self._layer_prompts(at, before, sizes))

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens. The tokens before the positions that are processed again."""
        return max(0, self._backlog.cached_tokens(running) - self._kept)

    def _write_first(self, batch: int) -> None:
        """Write the inputs that all layers share in a round."""
        pairs = self._pairs
        query, counts = pairs.most, pairs.counts[:batch]
        pairs.write_first(batch, query)
        rows = self._score_rows.view(batch, 1)
        torch.clamp(counts[:, None], min=1, out=rows)
        torch.add(rows, self._draft.layout.row_starts(batch, query) - 1, out=rows)
        torch.add(self._line_starts(batch, query)[:, 0], counts, out=self._last_rows[:batch])
        torch.sub(self._last_rows[:batch], 1, out=self._last_rows[:batch]).clamp_(min=0)
        self._tokens.zero_()
        torch.clamp(pairs.tokens[:batch, :query], min=0, out=self._tokens[:batch, :query])

    def _run_layer(self, batch: int, at: int, drafted: int) -> None:
        """Run layer ``at``, counted from 0, over the pairs; ``drafted`` tokens of the window are sampled."""
        query, width = self._pairs.most, self._tokens.shape[1]
        if 0 < at <= drafted:
            places = self._line_starts(batch, width)[:, 0] + self._pairs.counts[:batch] + (at - 1)
            self._tokens.view(-1).index_copy_(0, places, self._sampler.tokens[at - 1, :batch])
        self._pairs.first_tokens.view(batch, query).copy_(self._tokens[:batch, at : at + query])
        self._layer_call(batch, at).run()

    def _run_step(self, batch: int, step: int) -> None:
        """Write the logits of ``step``: its own layer's, or the last layer's with the state that it computed itself."""
        depth = len(self._layers)
        if not step:
            self._write_first(batch)
        if step < depth:
            self._run_layer(batch, step, step)
            return
        if step == depth:
            layer_states = self._layer_states[(depth - 1) % 2].view(batch * self._pairs.most, self._pairs.hidden)
            own = self._step_states[step % 2].view(batch, self._pairs.hidden)
            torch.index_select(layer_states, 0, self._last_rows[:batch], out=own)
        self._step_call(batch, step).run()

    def _bind_layer(self, batch: int, at: int) -> Call:
        pairs = self._pairs
        tokens, rows = pairs.first_tokens.view(batch, pairs.most), self._score_rows.view(batch, 1)
        layer_states = self._layer_states[(at - 1) % 2] if at else pairs.first_states
        return self._bind(at, tokens, rows, pairs.first_index[:batch], layer_states, self._layer_states[at % 2])

    def _bind_step(self, batch: int, step: int) -> Call:
        depth, sampler = len(self._layers), self._sampler
        states, next_states = self._step_states[step % 2], self._step_states[(step + 1) % 2]
        tokens, index = sampler.tokens[step - 1, :batch, None], sampler.index[step - depth + 1, :batch]
        return self._bind(depth - 1, tokens, self._draft.layout.row_starts(batch, 1), index, states, next_states)

    def _bind(
        self,
        at: int,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        states: Buffer,
        next_states: Buffer,
    ) -> Call:
        """Bind a call of layer ``at`` over ``tokens`` [batch, query] from position ``index`` [batch] on."""
        return self._layers[at].bind(
            {
                "token_ids": self._draft.layout.token_ids(tokens, NO_PROMPTS),
                "states": self._pairs.shaped(states, tokens),
                "next_states": self._pairs.shaped(next_states, tokens),
                "score_rows": rows,
                "write_index": index,
                "logits": self._sampler.logits.view(len(tokens), 1, self._draft.width),
                **self.caches[at].rows(0, len(tokens)),
            }
        )

    def _bind_layer_prompts(self, at: int, before: int, prompts: Packed) -> Call:
        """Bind the call of layer ``at`` for a round's prompts, whose states follow those of ``before`` tokens."""
        count, pairs = prompts.prompt_tokens, self._pairs
        if at:
            states = self._layer_states[(at - 1) % 2].view(count, pairs.hidden)
        else:
            states = pairs.fused.view(before + count, pairs.hidden)[before:]
        others = {"states": states, "next_states": self._layer_states[at % 2].view(count, pairs.hidden)}
        logits = self._sampler.logits
        return packed_prefill_call(self._layers[at], self.caches[at], self._layouts[at], prompts, logits, others)

    def _make_line_starts(self, batch: int, width: int) -> torch.Tensor:
        """int64 [batch, 1]: 0, width, 2 * width, …"""
        return torch.tensor([[width * row] for row in range(batch)], dtype=torch.int64, device=self._draft.device)
