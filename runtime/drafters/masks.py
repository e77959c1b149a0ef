"""Masks for drafts: what a drafted token may be, by a fork of its request's constraint."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.drafters.target_ids import TargetIds
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.round import Round


class DraftMasks:
    """Follows the drafted tokens of a round and bars in the draft's logits what its constraint would refuse.

    Every drafted token is waited for, so that the next one's mask is known. Verification masks again, and what is
    drafted changes no text. ``vocab`` is the target's width; ``target_ids``: see DraftResources.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, target_ids: TargetIds | None = None) -> None:
        self._vocab = vocab
        self._ids = target_ids
        self._width = vocab if target_ids is None else len(target_ids)
        self._words = np.zeros((slots, mask_words(vocab)), np.int32)
        self._rows = MaskRows(self._words)
        self._bars = Buffer((slots, self._width), torch.float32, device, host=True)  # 0, or -inf where barred
        self._forks: dict[int, tuple[Constraint, Running]] = {}

    @contextmanager
    def following(self, this: Round) -> Iterator[None]:
        """Stand where the committed texts of ``this`` round stand that drafts are verified for, within the block."""
        try:
            for slot, running in this.rows.items():
                with suppress(Exception), counted(running):  # else its drafts are not masked; as in ``apply``
                    if this.most(running) > 0:
                        self._forks[slot] = (running.constraint.fork(), running)
            yield
        finally:
            self._forks = {}

    def apply(self, logits: torch.Tensor) -> None:
        """Bar in the draft's ``logits`` [batch, width] what may not follow. A row nobody follows stays as it is."""
        batch = len(logits)
        bars = self._bars.host_view(batch, self._width).numpy()
        bars.fill(0)
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with counted(running):
                    fork.fill((), self._rows, slot)
            except BaseException:  # it fails again when masks are filled, which ends the request
                del self._forks[slot]
                continue
            allowed = np.unpackbits(self._words[slot].view(np.uint8), count=self._vocab, bitorder="little")
            if self._ids is not None:
                allowed = allowed[self._ids]
            bars[slot][allowed == 0] = -np.inf
        self._bars.copy_in(batch, self._width)
        logits.add_(self._bars.view(batch, self._width))

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on by the ``tokens`` that were drawn, by slot; a text that ends or cannot go on is followed no further."""
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with counted(running):
                    ended = tokens[slot] < 0 or fork.commit([tokens[slot]]).finish is not None
            except BaseException:  # as above
                ended = True
            if ended:
                del self._forks[slot]


def counted(running: Running) -> AbstractContextManager[None]:
    """Count the block as a step of the request's grammar, see GrammarShare."""
    return nullcontext() if running.share is None else running.share.step()
