"""EAGLE-3, MTP and P-EAGLE: drafts from a head that reads hidden states of the target.

EAGLE-3 and MTP run once per drafted token, P-EAGLE once per round.

"EAGLE-3" (arXiv 2503.01840), "P-EAGLE" (arXiv 2602.01469).
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Protocol

from tandemrt.engines.contract.calls import Packed, repacked
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import MAX_PACKED_CALLS
from tandemrt.runtime.caches.prompt_calls import packed_prefill_call
from tandemrt.runtime.device.backends.base import Call, prompt_rows
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.mask_tokens import MaskTokens
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.pair_store import PairStore
from tandemrt.runtime.drafters.prompt_ends import PromptEnds
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import Sampler, StepSampler, WindowSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class Head(Protocol):
    """Runs a draft head over the pairs of a PairStore."""

    def run(self, shape: RoundShape, step: int) -> None:
        """Write the logits of ``step``. Step 0 processes all pairs that are not in the cache yet."""

    def outputs(self, batch: int, rows: int) -> dict[str, torch.Tensor]:
        """The bindings of the hidden states that the head outputs, if any."""


class PairDrafter(NullHooks):
    """Processes the pairs (token, target state) that are not in the cache yet, and drafts after them.

    Each token that verification emits completes a pair. The next round processes the new pairs; rounds without drafts
    defer them, up to one window, because no more states are kept. So the cache depends only on the target's states. A
    text of one token has no pair yet; its first drafts are arbitrary.

    Over a paged cache, prompts are processed after the target's call of the round, which computes their states. Drafts
    for a request start in the round after the end of its prompt.

    ``max_length`` is None, because a bundle's texts are no longer than its head's positions.
    """

    max_length: int | None = None

    def __init__(self, draft: DraftResources, pairs: PairStore, head: Head, sampler: Sampler, *, chunk: int) -> None:
        """
        Args:
            draft: its layout is the head's own.
            chunk: the most prompt tokens of a call over a linear cache.
        """
        self.window = draft.window
        self.reads_prompts_late = draft.layout.packed
        self.caches = (draft.cache,)
        self._draft = draft
        self._pairs = pairs
        self._head = head
        self._sampler = sampler
        self._backlog = Backlog(pairs.most)
        self._chunk_tokens = Buffer((chunk,), torch.int64, draft.device)
        self._following = Buffer((draft.slots,), torch.int64, draft.device)
        self._prompts_call = lru_cache(MAX_PACKED_CALLS)(self._bind_prompts)
        self._prompt_ends = PromptEnds()

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._pairs.clear(slot)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill. Each state is paired with the next token."""
        (slots, count), draft = tokens.shape, self._draft
        last = self._following.view(slots)
        upload([after[0] for after in following], last)
        shifted = self._chunk_tokens.view(slots, count)
        shifted[:, : count - 1] = tokens[:, 1:]
        shifted[:, count - 1] = last
        states, rows = self._pairs.fuse_prompts(slots, count), prompt_rows(draft.engine)
        draft.engine.bind(
            {
                "token_ids": shifted,
                "states": states,
                "write_index": draft.state.view("length", slot + slots)[slot:],
                "score_rows": torch.zeros(slots, rows, dtype=torch.int64, device=draft.device),
                "logits": self._sampler.logits.view(slots, rows, draft.width),
                **self._head.outputs(slots, rows),
                **draft.cache.rows(slot, slots),
            }
        ).run()
        # The first drafted token is sampled after the newest pair, so that pair is processed once more.
        self._pairs.replace(slot, last, states[:, count - 1])
        self._backlog.join()

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.write_prompts. Each state is paired with the next token."""
        self._draft.layout.write(chunks, texts, sizes, ahead=1)
        self._prompt_ends.note(chunks, texts)

    def skip(self, round_: Round) -> None:
        """See Drafter.skip. The pairs are processed when the backlog is full."""
        if round_.batch and not self._backlog.defer(round_):
            shape, draft = RoundShape(round_.batch, 0), self._draft
            draft.graphs.run(("feed", shape), lambda: self._head.run(shape, 0), outputs=[], capturable=draft.capturable)

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose."""
        shape = round_.shape.without_prompts
        self._backlog.mark_processed()
        return self._sampler.propose(round_, shape, lambda: self._sampler.sample(shape, partial(self._head.run, shape)))

    def after_target(self, round_: Round) -> None:
        """See Drafter.after_target. Compute the states of all tokens."""
        self._pairs.fuse(round_.window_tokens + round_.prompts.prompt_tokens)

    def after_verify(self, round_: Round) -> None:
        """See Drafter.after_verify."""
        self._pairs.add_emitted(round_.batch, round_.window + 1, replace=self._backlog.emitted(round_))

    def read_prompts(self, round_: Round) -> None:
        """See Drafter.read_prompts."""
        before, sizes = round_.window_tokens, repacked(0, round_.prompts)
        self._draft.run_prompts(("draft", before, sizes), self._prompts_call(before, sizes))
        self._pair_prompt_ends(round_)

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return self._backlog.cached_tokens(running)

    def _pair_prompt_ends(self, round_: Round) -> None:
        """Set the newest pair of requests that decode only after the round in which their prompt ends.

        The others get it from the token that the round emits.
        """
        for slot, at, following in self._prompt_ends.of_later_rows(round_):
            token = self._following.view(1)
            upload([following], token)
            self._pairs.replace(slot, token, self._pairs.fused.view(at + 1, self._pairs.hidden)[at:])
            self._backlog.join()

    def _bind_prompts(self, before: int, prompts: Packed) -> Call:
        """Bind the call of a round's prompts, whose states follow those of ``before`` other tokens."""
        draft, pairs = self._draft, self._pairs
        states = pairs.fused.view(before + prompts.prompt_tokens, pairs.hidden)[before:]
        others = {"states": states, **self._head.outputs(1, 1)}
        return packed_prefill_call(draft.engine, draft.cache, draft.layout, prompts, self._sampler.logits, others)


class StepHead:
    """EAGLE-3, and MTP with one layer: runs the head once per drafted token.

    The first run processes the pairs. Each later step pairs the drafted token with the state that the head itself
    computed, at positions that the next round overwrites.
    """

    def __init__(self, draft: DraftResources, pairs: PairStore, sampler: StepSampler) -> None:
        self._draft = draft
        self._pairs = pairs
        self._sampler = sampler
        self._score_rows = Buffer((draft.slots,), torch.int64, draft.device)
        self._before_rows = cache(lambda batch, query: draft.layout.row_starts(batch, query) - 1)
        own = (draft.slots, 1, pairs.hidden)
        self._own_states = [Buffer(own, draft.dtype, draft.device) for _ in range(2)]  # of even and odd steps
        self._first_call = cache(self._bind_first)
        self._step_call = cache(self._bind_step)

    def run(self, shape: RoundShape, step: int) -> None:
        """See Head.run."""
        batch, pairs = shape.batch, self._pairs
        if step:
            self._step_call(batch, step).run()
            return
        query, counts = pairs.most, pairs.counts[:batch]
        pairs.write_first(batch, query)
        rows = self._score_rows.view(batch, 1)
        torch.clamp(counts[:, None], min=1, out=rows)
        torch.add(rows, self._before_rows(batch, query), out=rows)
        torch.clamp(pairs.tokens[:batch, :query], min=0, out=pairs.first_tokens.view(batch, query))
        self._first_call(batch, query).run()

    def outputs(self, batch: int, rows: int) -> dict[str, torch.Tensor]:
        """See Head.outputs."""
        return {"next_states": self._own_states[0].view(batch, rows, self._pairs.hidden)}

    def _bind_first(self, batch: int, query: int) -> Call:
        pairs = self._pairs
        tokens, rows = pairs.first_tokens.view(batch, query), self._score_rows.view(batch, 1)
        others = {"states": pairs.shaped(pairs.first_states, tokens), **self.outputs(batch, 1)}
        return self._draft.bind(tokens, rows, pairs.first_index[:batch], self._sampler.logits, others)

    def _bind_step(self, batch: int, step: int) -> Call:
        states, next_states = self._own_states[(step - 1) % 2], self._own_states[step % 2]
        tokens, index = self._sampler.tokens[step - 1, :batch, None], self._sampler.index[step, :batch]
        others = {
            "states": self._pairs.shaped(states, tokens),
            "next_states": next_states.view(batch, 1, self._pairs.hidden),
        }
        return self._draft.bind(tokens, self._draft.layout.row_starts(batch, 1), index, self._sampler.logits, others)


class ParallelHead:
    """P-EAGLE: runs the head once per round, over the pairs and ``window`` - 1 mask tokens with a learned state.

    The last pair and each mask predict one token. The next round overwrites the cache entries of mask tokens.
    """

    def __init__(self, draft: DraftResources, pairs: PairStore, sampler: WindowSampler, *, mask_token: int) -> None:
        self._draft = draft
        self._pairs = pairs
        self._sampler = sampler
        self._masks = MaskTokens(draft, mask_token)
        self._call = cache(self._bind)

    def run(self, shape: RoundShape, step: int) -> None:  # noqa: ARG002
        """See Head.run. A row without pairs has masks only."""
        batch, scored, pairs = shape.batch, max(1, shape.window), self._pairs
        query = pairs.most + scored - 1
        pairs.write_first(batch, query)
        self._masks.write(pairs.first_tokens.view(batch, query), pairs.tokens[:batch, :query])
        self._masks.score_from_last(pairs.counts[:batch], scored, query)
        self._call(batch, scored, query).run()

    def outputs(self, batch: int, rows: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """See Head.outputs."""
        return {}

    def _bind(self, batch: int, scored: int, query: int) -> Call:
        pairs = self._pairs
        tokens, rows = pairs.first_tokens.view(batch, query), self._masks.score_rows.view(batch, scored)
        others = {"states": pairs.shaped(pairs.first_states, tokens)}
        return self._draft.bind(tokens, rows, pairs.first_index[:batch], self._sampler.logits, others)
