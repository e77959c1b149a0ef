"""Gemma 4 assistants: a head that reads the target's newest state and KV cache, and has no cache of its own."""

from collections.abc import Mapping, Sequence
from functools import cache

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device.backends.base import Call, Engine
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.prompt_ends import PromptEnds
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import StepSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class TargetRows:
    """The part of the target's cache that a draft reads (a Cache)."""

    def __init__(self, target: Cache, engine: Engine) -> None:
        self._target = target
        self._read = {binding.name for binding in engine.contract.inputs}
        self.tensors = {name: tensor for name, tensor in target.tensors.items() if name in self._read}

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """See Cache.rows."""
        return {name: tensor for name, tensor in self._target.rows(start, count).items() if name in self._read}

    def bind(
        self,
        engine: Engine,
        slot: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        final: torch.Tensor | None = None,  # noqa: ARG002
        certain: int = 0,  # noqa: ARG002
        prompt_slots: torch.Tensor | None = None,  # noqa: ARG002
    ) -> Call:
        """See Cache.bind."""
        return engine.bind({**tensors, **self.rows(slot, len(tensors["write_index"]))})


class AssistantDrafter(NullHooks):
    """Keeps the newest token of each text with the target's state of the token before, and drafts from them.

    Each step reads the token and the state of the step before, all at the position of the newest token.
    """

    max_length: int | None = None  # a bundle's texts are no longer than its head's positions
    caches: tuple[Cache, ...] = ()

    def __init__(self, draft: DraftResources, sampler: StepSampler) -> None:
        """``draft``: its cache has the target's rows."""
        self.window = draft.window
        self.reads_prompts_late = draft.layout.packed
        self._draft = draft
        self._sampler = sampler
        features = draft.buffers.features
        assert features is not None
        self._features, self._hidden = features, int(draft.engine.contract["states"].shape[-1])
        states, slots, device = (draft.slots, 1, self._hidden), draft.slots, draft.device
        self._newest = Buffer((slots, 1), torch.int64, device)
        self._state = Buffer(states, draft.dtype, device)
        self._own_states = [Buffer(states, draft.dtype, device) for _ in range(2)]  # of even and odd steps
        self._tokens = Buffer((slots, draft.window + 2), torch.int64, device)
        self._states = Buffer((slots, draft.window + 2, self._hidden), draft.dtype, device)
        self._rows = cache(lambda batch, width: torch.arange(batch, device=device) * width)
        self._call = cache(self._bind)
        self._prompt_ends = PromptEnds()

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._newest.view(self._draft.slots, 1)[slot].zero_()
        self._state.view(self._draft.slots, 1, self._hidden)[slot].zero_()

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill. Over a paged cache, ``after_verify`` and ``read_prompts`` find the state."""
        (slots, count), features = tokens.shape, self._draft.buffers.prompt_features
        assert features is not None
        newest = self._newest.view(self._draft.slots, 1)[slot : slot + slots]
        upload([after[:1] for after in following], newest)
        states = features.view(slots, count, self._hidden)
        self._state.view(self._draft.slots, 1, self._hidden)[slot : slot + slots, 0] = states[:, count - 1]

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:  # noqa: ARG002
        """See Drafter.write_prompts. It has no inputs of prompts."""
        self._prompt_ends.note(chunks, texts)

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose."""
        shape = round_.shape.without_prompts
        return self._sampler.propose(
            round_, shape, lambda: self._sampler.sample(shape, lambda step: self._call(shape.batch, step).run())
        )

    def after_verify(self, round_: Round) -> None:
        """See Drafter.after_verify. A row that emitted nothing keeps what it has."""
        batch, query, buffers = round_.batch, round_.window + 1, self._draft.buffers
        if not batch:
            return
        newest, state = self._newest.view(batch, 1), self._state.view(batch, 1, self._hidden)
        tokens, states = self._tokens.view(batch, query + 1), self._states.view(batch, query + 1, self._hidden)
        tokens[:, :1], tokens[:, 1:] = newest, buffers.tokens.view(batch, query)
        states[:, :1], states[:, 1:] = state, self._features.view(batch, query, self._hidden)
        rows = self._rows(batch, query + 1) + buffers.count.view(batch)
        newest[:, 0] = tokens.view(-1)[rows]
        state[:, 0] = states.view(-1, self._hidden)[rows]

    def read_prompts(self, round_: Round) -> None:
        """See Drafter.read_prompts. Requests that decode only after the round start from the end of their prompt."""
        newest, state = self._newest.view(self._draft.slots), self._state.view(self._draft.slots, self._hidden)
        for slot, at, following in self._prompt_ends.of_later_rows(round_):
            upload([following], newest[slot : slot + 1])
            state[slot] = self._features.view(at + 1, self._hidden)[at]

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens)

    def _bind(self, batch: int, step: int) -> Call:
        """Bind step ``step`` of a window."""
        draft = self._draft
        tokens = self._sampler.tokens[step - 1, :batch, None] if step else self._newest.view(batch, 1)
        states = self._own_states[(step - 1) % 2] if step else self._state
        others = {
            "states": states.view(*draft.layout.token_shape(batch, 1, NO_PROMPTS), self._hidden),
            "next_states": self._own_states[step % 2].view(batch, 1, self._hidden),
        }
        index = draft.state.view("length", batch)
        return draft.bind(tokens, draft.layout.row_starts(batch, 1), index, self._sampler.logits, others)
