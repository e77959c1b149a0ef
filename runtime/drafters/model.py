"""Drafts from an independent, smaller model with the target's vocabulary and a cache of its own."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines import calls
from tandemrt.engines.calls import NO_PROMPTS, Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.drawing import StepwiseDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.planner import Chunk, plan, total
from tandemrt.runtime.round.prompt_calls import MOST_PACKED, prefill_call, prompts_call
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.runs import PromptRuns


class ModelDrafter(StepwiseDrafter):
    """Runs the draft model ``window`` times per round and draws each token as the request would.

    The first run of a round takes the two newest tokens: after a fully accepted window the last drafted token is in
    no cache yet, and writing the other one again changes nothing.

    Over a paged cache, a round's prompts ride along with that first run.

    Prompts of requests that never draft are not fed, unless others of their round are; see BlockHashes.

    ``missed`` are prompts as those of its resources, for what the draft is fed later; ``chunk``: the most tokens of one
    such call.
    """

    def __init__(self, resources: DraftResources, *, missed: PromptRuns | None, chunk: int, reach: int) -> None:
        super().__init__(resources, reach=reach)
        self._missed = missed
        self._chunk = chunk
        # Row r of `_index` holds length + r - 1: where step r - 1 writes its token, and what step r - 2 decides.
        self._seen: dict[int, int] = {}  # of slots that it was not asked for lately: tokens that are in its cache
        self._undrafted: set[int] = set()  # slots whose requests never draft
        self._feeds = True  # prompts of this round
        self._run_call = cache(self._bind_run)
        self._packed_call = lru_cache(MOST_PACKED)(self._bind_packed)
        self._prompts_call = lru_cache(MOST_PACKED)(self._bind_prompts)

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        if not running.request.window:
            self._undrafted.add(running.slot)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._seen.pop(slot, None)
        self._undrafted.discard(slot)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        """See Drafter.prefill."""
        if not self._undrafted.issuperset(range(slot, slot + len(tokens))):
            self._prefill(slot, tokens, self._state.view("length", slot + len(tokens))[slot:])

    def held(self, running: Running) -> int:
        """See Drafter.held. After a fully accepted window the last drafted token is in no cache yet.

        Of a request that never drafts nothing is missed.
        """
        if running.slot in self._undrafted:
            return len(running.tokens)
        held = max(running.prefill_end, len(running.tokens) - 2)
        return min(self._seen.get(running.slot, held), held)

    def skip(self, this: Round) -> None:
        """See Drafter.skip. What these rows emit meanwhile is fed to the draft before it is asked again."""
        for slot, running in this.rows.items():
            if slot not in self._undrafted:
                self._seen[slot] = self.held(running)
        prompts = self._fed(this)
        if prompts != NO_PROMPTS:
            assert self._runs is not None
            self._take_in(self._runs, prompts)

    def overruled(self, running: Running, kept: int) -> None:
        """See Drafter.overruled. Its cache holds what it drafted; the text goes on otherwise from there."""
        self._seen[running.slot] = len(running.tokens) + kept

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw per drafted token."""
        self._catch_up(this.rows)
        batch, window, filters, prompts = this.batch, this.window, this.filters, self._fed(this)
        draft_probs, outputs = self._proposal(this)

        keep_probs = draft_probs is not None
        key = ("propose", batch, window, not keep_probs, filters)
        if prompts == NO_PROMPTS:
            self._run(key, lambda: self._chain(batch, window, None, keep_probs=keep_probs, filters=filters), outputs)
            return draft_probs
        sizes = calls.beside(2 * batch, prompts)
        first = self._packed_call(batch, sizes)

        def work() -> None:
            assert self._runs is not None
            self._runs.windows(batch, 2, sizes).copy_(self._state.newest[:batch])
            self._chain(batch, window, first, keep_probs=keep_probs, filters=filters)

        tokens = 2 * batch + sizes.prompt_tokens
        capturable = self._capturable and self._masked is None
        self._graphs.run_with_prompts((*key, sizes), work, first, tokens=tokens, capturable=capturable)
        return draft_probs

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.reads."""
        self._feeds = not self._undrafted.issuperset(chunk.slot for chunk in chunks)

    def _fed(self, this: Round) -> Packed:
        """The prompts of a round, if any of them are wanted here."""
        return this.prompts if self._feeds else NO_PROMPTS

    def _chain(self, batch: int, window: int, first: Call | None, *, keep_probs: bool, filters: bool) -> None:
        """Draft step by step; ``first``: the first run, where prompts ride along with it."""
        length = self._state.view("length", batch)
        # A text of one token has no previous one: `newest` repeats it, and its first copy is the one to score.
        torch.add(length, self._steps, out=self._index[:, :batch]).clamp_(min=0)
        torch.clamp(length[:, None], max=1, out=self._score_rows.view(batch, 1)).add_(self._starts(batch, 2))

        def run(step: int) -> None:
            (first if first is not None and step == 0 else self._run_call(batch, step)).run()

        self._draw(batch, window, run, keep_probs=keep_probs, filters=filters)

    def _catch_up(self, rows: Mapping[int, Running]) -> None:
        """Feed the draft what these texts have and it was not asked for; the round itself feeds the newest two."""
        late = [Chunk(slot, self._seen.pop(slot), len(rows[slot].tokens) - 1) for slot in rows if slot in self._seen]
        texts = {chunk.slot: rows[chunk.slot].tokens for chunk in late}
        while chunks := plan(late, self._chunk):
            if self._missed is None:
                self._feed(chunks, texts)
            else:
                sizes = calls.packed(0, total(chunks), len(chunks))
                self._missed.write(chunks, texts, sizes)
                self._take_in(self._missed, sizes)
            ends = {chunk.slot: chunk.end for chunk in chunks}
            late = [chunk._replace(start=ends.get(chunk.slot, chunk.start)) for chunk in late]

    def _feed(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]]) -> None:
        for slot, start, end in chunks:
            tokens = self._buffers.chunk.view(1, end - start)
            upload([texts[slot][start:end]], tokens)
            self._index[0, :1].fill_(start)
            self._prefill(slot, tokens, self._index[0, :1])

    def _take_in(self, runs: PromptRuns, sizes: Packed) -> None:
        alone = calls.beside(0, sizes)
        call = self._prompts_call(runs, alone)
        key, tokens = ("draft", runs is self._missed, alone), alone.prompt_tokens
        self._graphs.run_with_prompts(key, call.run, call, tokens=tokens, capturable=self._capturable)

    def _prefill(self, slot: int, tokens: torch.Tensor, length: torch.Tensor) -> None:
        prefill_call(self._engines["draft"], self._cache, slot, tokens, length, self._logits).run()

    def _bind_run(self, batch: int, step: int) -> Call:
        if not step:
            rows = self._score_rows.view(batch, 1)
            return self._bind_windows(self._state.newest[:batch], rows, self._index[0, :batch])
        tokens = self._tokens[step - 1, :batch, None]
        return self._bind_windows(tokens, self._starts(batch, 1), self._index[step + 1, :batch])

    def _bind_packed(self, batch: int, prompts: Packed) -> Call:
        assert self._runs is not None
        tokens, rows = self._runs.token_ids(2 * batch, prompts), self._score_rows.view(batch, 1)
        return self._bind_windows(tokens, rows, self._index[0, :batch], self._runs.bindings(prompts))

    def _bind_prompts(self, runs: PromptRuns, sizes: Packed) -> Call:
        return prompts_call(self._engines["draft"], self._cache, runs, sizes, self._logits)
