"""The inputs of draft heads: pairs of a token and the target's hidden state of the token before it."""

from functools import lru_cache

from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import MAX_PACKED_CALLS
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.drafters.resources import DraftResources


class PairStore:
    """Stores the pairs of each slot that are not in the draft's cache yet, and computes states for new pairs.

    Token j + 1 of a text is paired with the target's state of token j, at position j of the draft's cache. The engine
    "fuse" computes the state from the features (hidden states of target layers).

    Attributes:
        hidden: width of a state.
        most: maximum pairs per slot.
        tokens: int64 [slots, query]; -1 after the pairs of a slot.
        states: [slots, most, hidden].
        counts: int64 [slots], pairs of each slot. The first is at position ``length`` - count.
        first_index: int64 [slots], that position, written by ``write_first``.
        first_tokens: int64 [slots, query], for the draft's first run of a round.
        first_states: [slots, query, hidden], written by ``write_first``.
        fused: [tokens, hidden], states of all tokens of the last target call.
    """

    def __init__(self, draft: DraftResources, *, query: int, chunk: int, kept: int = 0) -> None:
        """
        Args:
            query: maximum tokens per row of a run of the draft.
            chunk: maximum prompt tokens of a call over a linear cache.
            kept: how many pairs of a text are processed again before new ones.
        """
        device, dtype, slots = draft.device, draft.dtype, draft.slots
        self.hidden = int(draft.engine.contract["states"].shape[-1])
        self.most = draft.window + 1 + kept
        self.tokens = torch.zeros(slots, query, dtype=torch.int64, device=device).fill_(-1)
        self.states = torch.zeros(slots, self.most, self.hidden, dtype=dtype, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.first_index = torch.zeros(slots, dtype=torch.int64, device=device)
        self.first_tokens = Buffer((slots, query), torch.int64, device)
        self.first_states = Buffer((slots, query, self.hidden), dtype, device)
        features = draft.buffers.features
        assert features is not None
        self._features, self._feature_width = features, int(draft.engines["fuse"].contract["features"].shape[-1])
        tokens = max(features.device.numel() // self._feature_width, chunk)
        self.fused = Buffer((tokens, self.hidden), dtype, device)
        self._has_pairs = torch.zeros(slots, dtype=torch.int64, device=device)
        self._slot_ids = torch.arange(slots, device=device)
        self._draft = draft
        self._fuse_call = lru_cache(MAX_PACKED_CALLS)(self._bind_fuse)

    def clear(self, slot: int) -> None:
        """Remove the pairs of ``slot``."""
        self.tokens[slot].fill_(-1)  # an assignment would copy the number and wait for the device
        self.counts[slot].zero_()

    def fuse(self, tokens: int) -> None:
        """Compute ``fused`` from the features of the first ``tokens`` tokens of the target's call."""
        self._fuse_call(tokens).run()

    def fuse_prompts(self, slots: int, count: int) -> torch.Tensor:
        """Return the states [slots, count, hidden] of a prompt call over a linear cache."""
        features, tokens = self._draft.buffers.prompt_features, slots * count
        assert features is not None
        states = self.fused.view(tokens, self.hidden)
        inputs = {"features": features.view(tokens, self._feature_width), "states": states}
        self._draft.engines["fuse"].bind(inputs).run()
        return self.fused.view(slots, count, self.hidden)

    def replace(self, slot: int, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Set the only pair of the slots from ``slot`` on: ``tokens`` [slots], ``states`` [slots, hidden]."""
        end = slot + len(tokens)
        self.tokens[slot:end].fill_(-1)
        self.tokens[slot:end, 0] = tokens
        self.states[slot:end, 0] = states
        self.counts[slot:end].fill_(1)

    def add_emitted(self, batch: int, query: int, *, replace: bool) -> None:
        """Pair the emitted tokens of a round, in RoundBuffers, with ``fused``.

        ``replace``: the round has processed the earlier pairs. Else it has emitted at most one token per row.
        """
        buffers, counts = self._draft.buffers, self.counts[:batch]
        states, tokens = self.fused.view(batch, query, self.hidden), buffers.tokens.view(batch, query)
        if replace:
            self.states[:batch, :query] = states
            self.tokens[:batch, :query] = tokens
            self.tokens[:batch, query:].fill_(-1)
            counts.copy_(buffers.count.view(batch))
            return
        next_pair = (self._slot_ids[:batch], counts)
        self.states[next_pair] = states[:, 0]
        self.tokens[next_pair] = tokens[:, 0]
        counts.add_(buffers.count.view(batch))

    def write_first(self, batch: int, query: int) -> None:
        """Write positions and states for the first run of a round over [batch, query] pairs.

        A slot without pairs writes after its text, with zero states: free slots share a scratch block, so all of them
        must write the same values (SlotState.leave).
        """
        counts = self.counts[:batch]
        torch.sub(self._draft.state.view("length", batch), counts, out=self.first_index[:batch])
        torch.clamp(counts, max=1, out=self._has_pairs[:batch])
        states = self.first_states.view(batch, query, self.hidden)[:, : self.most]
        torch.mul(self.states[:batch], self._has_pairs[:batch, None, None], out=states)

    def shaped(self, states: Buffer, tokens: torch.Tensor) -> torch.Tensor:
        """View ``states`` for a call over ``tokens`` [batch, query], in the draft's layout."""
        batch, query = tokens.shape
        return states.view(*self._draft.layout.token_shape(batch, query, NO_PROMPTS), self.hidden)

    def _bind_fuse(self, tokens: int) -> Call:
        return self._draft.engines["fuse"].bind(
            {
                "features": self._features.view(tokens, self._feature_width),
                "states": self.fused.view(tokens, self.hidden),
            }
        )
