"""Masks for drafts: what a drafted token may be, by a fork of its request's constraint."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer


class DraftMasks:
    """Follows the drafted tokens of a round and bars in the draft's logits what its constraint would refuse.

    Every drafted token is waited for, so that the next one's mask is known. Verification masks again, and what is
    drafted changes no text. A draft with a vocabulary of its own has logits as wide as the target's.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._words = np.zeros((slots, mask_words(vocab)), np.int32)
        self._rows = MaskRows(self._words)
        self._bars = Buffer((slots, vocab), torch.float32, device, host=True)  # 0, or -inf for a token that is barred
        self._forks: dict[int, tuple[Constraint, Running]] = {}

    def begin(self, rows: Mapping[int, Running]) -> None:
        """Stand where the committed texts of ``rows`` stand, by slot."""
        self._forks = {}
        for slot, running in rows.items():
            with suppress(Exception):  # its drafts are not masked then; what ails it is said where masks are filled
                self._forks[slot] = (running.constraint.fork(), running)

    def apply(self, logits: torch.Tensor) -> None:
        """Bar in ``logits`` [batch, vocab] what may not follow. A row that nobody follows stays as it is."""
        batch = len(logits)
        bars = self._bars.host_view(batch, self._vocab).numpy()
        bars.fill(0)
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with nullcontext() if running.share is None else running.share.step():
                    fork.fill((), self._rows, slot)
            except BaseException:  # it fails again when masks are filled, which ends the request
                del self._forks[slot]
                continue
            allowed = np.unpackbits(self._words[slot].view(np.uint8), count=self._vocab, bitorder="little")
            bars[slot][allowed == 0] = -np.inf
        self._bars.copy_in(batch, self._vocab)
        logits.add_(self._bars.view(batch, self._vocab))

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on by the ``tokens`` that were drawn, by slot; a text that ends or cannot go on is followed no further."""
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with nullcontext() if running.share is None else running.share.step():
                    ended = tokens[slot] < 0 or fork.commit([tokens[slot]]).finish is not None
            except BaseException:  # as above
                ended = True
            if ended:
                del self._forks[slot]
