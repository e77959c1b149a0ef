"""Verification on a CPU: numpy decides greedy batches, in a tenth of the graph's time, and the graph decides others.

plugins/reference/verify.py defines the result, which is the same either way.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.host_tensor import array_of
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.deferred import DeferredEngine


class GreedyVerification(DeferredEngine):
    """The engine ``verify`` or ``verify_probs`` with float32 logits.

    The first batch that is not greedy opens the graph.
    """

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> Call:
        """See Engine.bind."""
        return self.bind_advancing(tensors, {}, filters=filters)

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, filters: bool = True
    ) -> Call:
        """See AdvancingEngine.bind_advancing."""
        check_tensors(self.contract, tensors, self.device)
        arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
        advance = {name: array_of(tensor) for name, tensor in moving.items()}
        return _GreedyCall(lambda: self._graph.bind(tensors, filters=filters), arrays, advance)


class _GreedyCall:
    def __init__(self, bind_graph: Callable[[], Call], arrays: dict[str, Any], moving: dict[str, Any]) -> None:
        self._bind_graph = bind_graph
        self._logits, self._words, self._temperature = (arrays[n] for n in ("logits", "bitmask", "temperature"))
        self._draft, self._length = arrays["draft_tokens"], arrays["draft_len"]
        self._tokens, self._count = arrays["tokens"], arrays["count"]
        self._newest = moving.get("newest")
        self._places = [place for name, place in moving.items() if name != "newest"]

    @cached_property
    def _graph(self) -> Call:
        return self._bind_graph()

    def run(self) -> None:
        """Run once."""
        self._verify()
        if self._newest is not None:
            self._advance(self._newest)

    def _verify(self) -> None:
        if self._temperature.max() > 0:
            self._graph.run()
            return
        scores = _masked(self._logits, self._words)
        choice = scores.argmax(-1)
        best = scores.reshape(-1, scores.shape[-1])[np.arange(choice.size), choice.reshape(-1)].reshape(choice.shape)
        if not (best < np.inf).all():  # infinity or NaN, which cannot be chosen
            self._graph.run()
            return
        self._write(choice.tolist(), (best > -np.inf).tolist())

    def _write(self, choice: list[list[int]], samplable: list[list[bool]]) -> None:
        """Write the accepted drafts and the next token of each request. ``samplable``: whether any token is allowed."""
        self._tokens.fill(-1)
        for at, (draft, length) in enumerate(zip(self._draft.tolist(), self._length.tolist(), strict=True)):
            accepted = 0
            while accepted < length and samplable[at][accepted] and draft[accepted] == choice[at][accepted]:
                accepted += 1
            emitted = choice[at][: accepted + samplable[at][accepted]]
            self._tokens[at, : len(emitted)] = emitted
            self._count[at] = len(emitted)

    def _advance(self, newest: npt.NDArray[np.int64]) -> None:
        counts, tokens = self._count.tolist(), self._tokens.tolist()
        newest[:] = [
            [*last, *emitted][count : count + 2]
            for last, emitted, count in zip(newest.tolist(), tokens, counts, strict=True)
        ]
        for place in self._places:
            place += self._count


def _masked(logits: npt.NDArray[np.float32], words: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return ``logits`` with minus infinity for tokens whose bit in ``words`` is 0 (plugins/reference/bitmask.py)."""
    if (words == -1).all():
        return logits
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little", count=logits.shape[-1])
    return np.where(bits.view(np.bool_), logits, np.float32(-np.inf))
