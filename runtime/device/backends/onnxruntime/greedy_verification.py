"""Verification on a CPU: numpy decides greedy batches, in a tenth of the graph's time, and the graph decides others.

plugins/reference/verify.py defines the result, which is the same either way.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.host_tensor import array_of
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.onnxruntime.deferred import DeferredEngine

_Logits = npt.NDArray[np.float32]
_Words = npt.NDArray[np.int32]


class GreedyVerification(DeferredEngine):
    """The engine ``verify`` or ``verify_probs`` with float32 logits.

    The first batch that is not greedy opens the graph.
    """

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Call:
        """See Engine.bind."""
        return self.bind_advancing(tensors, {}, needs_probs=needs_probs)

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, needs_probs: bool = True
    ) -> Call:
        """See AdvancingEngine.bind_advancing."""
        check_tensors(self.contract, tensors, self.device)
        arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
        advance = {name: array_of(tensor) for name, tensor in moving.items()}
        return _GreedyCall(lambda: self._graph.bind(tensors, needs_probs=needs_probs), arrays, advance)


class _GreedyCall:
    def __init__(self, bind_graph: Callable[[], Call], arrays: dict[str, Any], moving: dict[str, Any]) -> None:
        self._bind_graph = bind_graph
        self._temperature, self._draft, self._length = (arrays[n] for n in ("temperature", "draft_tokens", "draft_len"))
        self._tokens, self._count = arrays["tokens"], arrays["count"]
        # By request and position: logits and mask words.
        self._rows = [[*zip(*both, strict=True)] for both in zip(arrays["logits"], arrays["bitmask"], strict=True)]
        self._newest = moving.get("newest")
        self._places = [place for name, place in moving.items() if name != "newest"]

    @cached_property
    def _graph(self) -> Call:
        return self._bind_graph()

    def run(self) -> None:
        """Run once."""
        emitted = self._decide()
        if emitted is None:
            self._graph.run()
            emitted = [row[:count] for row, count in zip(self._tokens.tolist(), self._count.tolist(), strict=True)]
        else:
            width = self._tokens.shape[1]
            self._tokens[:] = [[*tokens, *[-1] * (width - len(tokens))] for tokens in emitted]
            self._count[:] = [*map(len, emitted)]
        if self._newest is not None:
            pairs = zip(self._newest.tolist(), emitted, strict=True)
            self._newest[:] = [[*last, *tokens][-2:] for last, tokens in pairs]
            for place in self._places:
                place += self._count

    def _decide(self) -> list[list[int]] | None:
        """Return the accepted drafts and the next token of each request, or None if numpy cannot choose them."""
        if self._temperature.any():
            return None
        emitted = []
        for rows, draft, length in zip(self._rows, self._draft.tolist(), self._length.tolist(), strict=True):
            tokens = _emitted(rows, draft, length)
            if tokens is None:
                return None
            emitted.append(tokens)
        return emitted


def _emitted(rows: Sequence[tuple[_Logits, _Words]], draft: list[int], length: int) -> list[int] | None:
    """Return the tokens of one request, or None if numpy cannot choose one. Later rows are not read."""
    tokens: list[int] = []
    for row in range(length + 1):
        token = _choice(*rows[row])
        if token is None:
            return None
        if token < 0:
            break
        tokens.append(token)
        if row < length and token != draft[row]:
            break
    return tokens


def _choice(logits: _Logits, words: _Words) -> int | None:
    """Return the most likely token of those whose bit in ``words`` is 1 (plugins/reference/bitmask.py).

    -1: no token is allowed. None: there is infinity or NaN, which cannot be chosen.
    """
    best = int(logits.argmax())
    if int(words[best >> 5]) >> (best & 31) & 1:  # the usual case, also with a grammar
        if -np.inf < logits[best] < np.inf:
            return best
    elif not words.any():
        return -1
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits)).view(np.bool_)
    scores = np.where(allowed, logits, np.float32(-np.inf))
    best = int(scores.argmax())
    if not scores[best] < np.inf:
        return None
    return best if scores[best] > -np.inf else -1
