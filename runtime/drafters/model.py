"""Drafts from an independent, smaller model with the target's vocabulary and a KV cache of its own."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from tandemrt.engines.contract import calls
from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import MAX_PACKED_CALLS, CallLayout
from tandemrt.runtime.caches.prompt_calls import linear_prefill_call, packed_prefill_call
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk, plan
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import StepSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class ModelDrafter(NullHooks):
    """Runs the draft model once per drafted token.

    The first run of a round processes the last two tokens, because after a fully accepted window the last drafted token
    is not in the cache yet. Otherwise one of them is written again, with the same values. Over a paged cache, prompts
    are processed at the end of a round, so that first tokens do not wait for them; drafts start in the next round.

    Prompts of requests that never draft are skipped, unless the round has other prompts; see BlockHashes.
    """

    def __init__(
        self, draft: DraftResources, sampler: StepSampler, *, catch_up: CallLayout, chunk: int, max_length: int
    ) -> None:
        """
        Args:
            catch_up: another layout like that of ``draft``, for tokens that the draft missed.
            chunk: maximum tokens of one catch-up call.
            max_length: see Drafter.
        """
        self.window = draft.window
        self.reads_prompts_late = draft.layout.packed
        self.max_length: int | None = max_length
        self.caches = (draft.cache,)
        self._draft = draft
        self._sampler = sampler
        self._catch_up_layout = catch_up
        self._chunk = chunk
        self._score_rows = Buffer((draft.slots,), torch.int64, draft.device)
        self._cached: dict[int, int] = {}  # by slot with missed tokens: number of tokens in the cache
        self._never_drafts: set[int] = set()  # slots whose requests never draft
        self._behind = False  # whether drafts from the text replaced its own in the last round
        self._reads_prompts = True  # whether the drafter processes the prompts of this round
        self._first_call = cache(self._bind_first)
        self._step_call = cache(self._bind_step)
        self._prompts_call = lru_cache(MAX_PACKED_CALLS)(self._bind_prompts)

    @property
    def behind(self) -> bool:
        """See Drafter."""
        return self._behind

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        if not running.request.num_draft_tokens:
            self._never_drafts.add(running.slot)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._cached.pop(slot, None)
        self._never_drafts.discard(slot)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        """See Drafter.prefill."""
        if not self._never_drafts.issuperset(range(slot, slot + len(tokens))):
            self._prefill(slot, tokens, self._draft.state.view("length", slot + len(tokens))[slot:])

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.write_prompts. The target's prompts are also the draft's."""
        self._reads_prompts = not self._never_drafts.issuperset(chunk.slot for chunk in chunks)

    def skip(self, round_: Round) -> None:
        """See Drafter.skip. The next ``propose`` processes the tokens that are emitted meanwhile."""
        self._behind |= round_.window > 0
        for slot, running in round_.rows.items():
            if slot not in self._never_drafts:
                self._cached[slot] = self.cached_tokens(running)

    def read_prompts(self, round_: Round) -> None:
        """See Drafter.read_prompts."""
        if self._reads_prompts:
            self._run_prompts(self._draft.layout, round_.prompts)
        for slot in round_.undrafted & self._cached.keys() & round_.rows.keys():  # drafted before the prompt was read
            self._cached[slot] = min(self._cached[slot], round_.rows[slot].prefill_end)

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose. One run of the model and one sampling call per drafted token."""
        self._catch_up(round_.rows)
        batch, shape = round_.batch, round_.shape.without_prompts

        def run(step: int) -> None:
            if not step:
                self._write_first(batch)
            (self._step_call(batch, step) if step else self._first_call(batch)).run()

        return self._sampler.propose(round_, shape, lambda: self._sampler.sample(shape, run))

    def replaced(self, running: RunningRequest, kept: int) -> None:
        """See Drafter.replaced. Cache entries of the replaced drafts are invalid."""
        self._behind = True
        self._cached[running.slot] = len(running.tokens) + kept

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens. After a fully accepted window the last drafted token is not in the cache yet.

        Requests that never draft count as cached.
        """
        if running.slot in self._never_drafts:
            return len(running.tokens)
        cached = max(running.prefill_end, len(running.tokens) - 2)
        return min(self._cached.get(running.slot, cached), cached)

    def _write_first(self, batch: int) -> None:
        """Write positions and scored rows of the first run, over two tokens per row."""
        self._sampler.index[0, :batch].clamp_(min=0)
        # A text of one token has no token before it: `newest` repeats the token, and its first copy is scored.
        length, rows = self._draft.state.view("length", batch), self._score_rows.view(batch, 1)
        torch.clamp(length[:, None], max=1, out=rows).add_(self._draft.layout.row_starts(batch, 2))

    def _catch_up(self, rows: Mapping[int, RunningRequest]) -> None:
        """Process the tokens that the draft missed; the round itself processes the newest two."""
        self._behind = False
        missed = [
            Chunk(slot, self._cached.pop(slot), len(rows[slot].tokens) - 1) for slot in rows if slot in self._cached
        ]
        texts = {chunk.slot: rows[chunk.slot].tokens for chunk in missed}
        while chunks := plan(missed, self._chunk):
            prompts = self._catch_up_layout.prompts_of(0, chunks)
            if prompts == NO_PROMPTS:
                self._prefill_chunks(chunks, texts)
            else:
                self._catch_up_layout.write(chunks, texts, prompts)
                self._run_prompts(self._catch_up_layout, prompts)
            ends = {chunk.slot: chunk.end for chunk in chunks}
            missed = [chunk._replace(start=ends.get(chunk.slot, chunk.start)) for chunk in missed]

    def _prefill_chunks(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]]) -> None:
        start_of = self._sampler.index[0, :1]
        for slot, start, end in chunks:
            tokens = self._draft.buffers.chunk.view(1, end - start)
            upload([texts[slot][start:end]], tokens)
            start_of.fill_(start)
            self._prefill(slot, tokens, start_of)

    def _prefill(self, slot: int, tokens: torch.Tensor, length: torch.Tensor) -> None:
        linear_prefill_call(self._draft.engine, self._draft.cache, slot, tokens, length, self._sampler.logits).run()

    def _run_prompts(self, layout: CallLayout, prompts: Packed) -> None:
        alone = calls.repacked(0, prompts)
        self._draft.run_prompts(("draft", layout, alone), self._prompts_call(layout, alone))

    def _bind_first(self, batch: int) -> Call:
        newest, rows = self._draft.state.newest[:batch], self._score_rows.view(batch, 1)
        return self._draft.bind(newest, rows, self._sampler.index[0, :batch], self._sampler.logits)

    def _bind_step(self, batch: int, step: int) -> Call:
        tokens, index = self._sampler.tokens[step - 1, :batch, None], self._sampler.index[step + 1, :batch]
        first = self._sampler.index[0, :batch]  # where this round began: all of its tokens may be rejected
        return self._draft.bind(
            tokens, self._draft.layout.row_starts(batch, 1), index, self._sampler.logits, final=first
        )

    def _bind_prompts(self, layout: CallLayout, prompts: Packed) -> Call:
        return packed_prefill_call(self._draft.engine, self._draft.cache, layout, prompts, self._sampler.logits)
