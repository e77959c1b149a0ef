"""Pairs of each text that a draft with several layers processes again before new ones."""

from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.streams import upload


class KeptPairs:
    """Keeps the last ``kept`` pairs of each slot's text, or all if it has fewer, at the start of its row of pairs."""

    def __init__(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: torch.Tensor, *, kept: int, query: int
    ) -> None:
        """
        Args:
            tokens: int64 [slots, ...], the rows of pairs; emitted pairs follow the kept ones.
            states: [slots, pairs, hidden], theirs.
            counts: int64 [slots], pairs in each row; entries after them are undefined.
            query: the most tokens that a round emits.
        """
        slots, self._pairs, hidden = states.shape
        device = states.device
        self._kept = kept
        self._tokens, self._states, self._counts = tokens, states, counts
        self._joined_tokens = Buffer((slots, self._pairs + query), torch.int64, device)
        self._joined_states = Buffer((slots, self._pairs + query, hidden), states.dtype, device)
        self._carried = [0] * slots  # pairs of a prompt in prefill
        self._columns = cache(lambda width: torch.arange(width, device=device)[None])
        self._rows = cache(lambda batch, width: torch.arange(batch, device=device)[:, None] * width)

    def clear(self, slot: int) -> None:
        """Start a new text in ``slot``."""
        self._carried[slot] = 0

    def hide(self, slot: int) -> None:
        """Process no pair again until ``carry``: the slot is placed after prompt tokens that are not processed yet."""
        self._counts[slot].zero_()  # an assignment would copy the number and wait for the device

    def carry(self, slot: int, tokens: list[int], states: torch.Tensor) -> None:
        """Keep the last pairs of a prompt in prefill: ``tokens``, with the last of ``states``."""
        new = len(tokens)
        old = min(self._kept - new, self._carried[slot])
        if begin := self._carried[slot] - old:
            self._tokens[slot, :old] = self._tokens[slot, begin : begin + old].clone()
            self._states[slot, :old] = self._states[slot, begin : begin + old].clone()
        upload(tokens, self._tokens[slot, old : old + new])
        self._tokens[slot, old + new :].fill_(-1)
        self._states[slot, old : old + new] = states[len(states) - new :]
        self._carried[slot] = old + new
        self._counts[slot].fill_(old + new)

    def add_emitted(self, tokens: torch.Tensor, states: torch.Tensor, count: torch.Tensor) -> None:
        """Append the emitted pairs of a round: the first ``count`` [batch] of ``tokens`` [batch, query]."""
        (batch, query), pairs = tokens.shape, self._pairs
        hidden, width = self._states.shape[-1], self._kept + query
        all_tokens = self._joined_tokens.view(batch, pairs + query)
        all_states = self._joined_states.view(batch, pairs + query, hidden)
        all_tokens[:, :pairs], all_tokens[:, pairs:] = self._tokens[:batch, :pairs], tokens
        all_states[:, :pairs], all_states[:, pairs:] = self._states[:batch], states
        counts = self._counts[:batch, None]
        keep = counts.clone().clamp_(max=self._kept)
        columns = self._columns(width) - keep
        new = (columns + 1).clamp_(min=0, max=1)  # 0 in the columns of kept pairs
        taken = (columns + counts + new * (pairs - counts)).clamp_(max=pairs + query - 1)
        rows = (taken + self._rows(batch, pairs + query)).reshape(-1)
        self._tokens[:batch, :width] = all_tokens.view(-1)[rows].view(batch, width)
        self._tokens[:batch, width:].fill_(-1)
        self._states[:batch, :width] = all_states.view(-1, hidden)[rows].view(batch, width, hidden)
        self._counts[:batch].copy_(keep[:, 0] + count)
