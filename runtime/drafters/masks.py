"""Grammar masks for drafts: forks of the requests' constraints follow the drafted tokens."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.drafters.target_ids import TargetIds
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class DraftMasks:
    """Masks in the draft's logits the tokens that a request's constraint would reject.

    The host waits for every drafted token, because the mask of the next one depends on it. Verification masks again:
    the drafts change no text. ``vocab``: the target's width; ``target_ids``: see DraftResources.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, target_ids: TargetIds | None = None) -> None:
        self._vocab = vocab
        self._ids = target_ids
        self._width = vocab if target_ids is None else len(target_ids)
        self._words = np.zeros((slots, mask_words(vocab)), np.int32)
        self._rows = MaskRows(self._words)
        self._biases = Buffer((slots, self._width), torch.float32, device, host=True)  # 0, or -inf where forbidden
        self._forks: dict[int, tuple[Constraint, RunningRequest]] = {}

    @contextmanager
    def following(self, round_: Round) -> Iterator[None]:
        """Fork the constraints with grammars of the round's requests at their committed texts, for the block.

        Drafts of other requests are never masked: a text under the rejection rule must not depend on its neighbours.
        """
        try:
            for slot, running in round_.rows.items():
                with suppress(Exception), _counted(running):  # a request that fails is not masked, as in ``apply``
                    if running.constraint.has_grammar and round_.max_drafted(running) > 0:
                        self._forks[slot] = (running.constraint.fork(), running)
            yield
        finally:
            self._forks = {}

    def apply(self, logits: torch.Tensor) -> None:
        """Forbid tokens in the draft's ``logits`` [batch, width]. Rows without a fork do not change."""
        batch = len(logits)
        biases = self._biases.host_view(batch, self._width).numpy()
        biases.fill(0)
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with _counted(running):
                    fork.fill_rows((), self._rows, slot)
            except BaseException:  # it fails again when verification's masks are written, which ends the request
                del self._forks[slot]
                continue
            allowed = np.unpackbits(self._words[slot].view(np.uint8), count=self._vocab, bitorder="little")
            if self._ids is not None:
                allowed = allowed[self._ids]
            biases[slot][allowed == 0] = -np.inf
        self._biases.copy_in(batch, self._width)
        logits.add_(self._biases.view(batch, self._width))

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance the forks by ``tokens``, by slot. A fork whose text ends or fails is dropped."""
        for slot, (fork, running) in list(self._forks.items()):
            try:
                with _counted(running):
                    ended = tokens[slot] < 0 or fork.commit([tokens[slot]]).finish is not None
            except BaseException:  # as above
                ended = True
            if ended:
                del self._forks[slot]


def _counted(running: RunningRequest) -> AbstractContextManager[None]:
    """Count the block as a step of the request's grammar."""
    return nullcontext() if running.grammar_time is None else running.grammar_time.step()
