"""Verification and drafting on a CPU: numpy chooses greedy and coupled tokens, in a tenth of the graph's time.

The graph decides batches with a request of the rejection rule, with logits that are not numbers, or with a sampled
request and a small vocabulary.
plugins/reference/verify.py and draft.py define the result, which is the same either way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.plugins.operators.constants import Rule
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.host_tensor import array_of
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.onnxruntime.deferred import DeferredEngine

if TYPE_CHECKING:
    from tandemrt.runtime.device.backends.onnxruntime.token_choice import RowSampling

WIDE = 32768  # tokens of a vocabulary from which on numpy is faster in all sampled batches

_Logits = npt.NDArray[np.float32]
_Words = npt.NDArray[np.int32]


class _HostEngine(DeferredEngine):
    """An engine with float32 logits. The first batch that numpy does not decide opens the graph."""

    def _bound(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool) -> "_Bound":
        check_tensors(self.contract, tensors, self.device)
        arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
        return _Bound(arrays, lambda: self._graph.bind(tensors, needs_probs=needs_probs))


class HostVerification(_HostEngine):
    """The engine ``verify`` or ``verify_probs``."""

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Call:
        """See Engine.bind."""
        return self.bind_advancing(tensors, {}, needs_probs=needs_probs)

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, needs_probs: bool = True
    ) -> Call:
        """See AdvancingEngine.bind_advancing."""
        advance = {name: array_of(tensor) for name, tensor in moving.items()}
        return _Verification(self._bound(tensors, needs_probs=needs_probs), advance)


class HostDrafting(_HostEngine):
    """The engine ``propose``."""

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Call:
        """See Engine.bind."""
        return _Drafting(self._bound(tensors, needs_probs=needs_probs))


@dataclass(frozen=True)
class _Bound:
    """Tensors of a call as arrays, and the call of the graph, which is bound when it first runs."""

    arrays: dict[str, Any]
    bind_graph: Callable[[], Call]

    @cached_property
    def graph(self) -> Call:
        return self.bind_graph()


class _Verification:
    def __init__(self, bound: _Bound, moving: dict[str, Any]) -> None:
        arrays, self._bound = bound.arrays, bound
        self._sampling = _Sampling(arrays)
        self._draft, self._length = arrays["draft_tokens"], arrays["draft_len"]
        self._tokens, self._count = arrays["tokens"], arrays["count"]
        # By request and position: logits and mask words.
        self._rows = [[*zip(*both, strict=True)] for both in zip(arrays["logits"], arrays["bitmask"], strict=True)]
        self._newest = moving.get("newest")
        self._places = [place for name, place in moving.items() if name != "newest"]

    def run(self) -> None:
        """Run once."""
        emitted = self._decide()
        if emitted is None:
            self._bound.graph.run()
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
        if self._sampling.needs_graph():
            return None
        emitted = []
        requests = zip(self._rows, self._draft.tolist(), self._length.tolist(), strict=True)
        for request, (rows, draft, length) in enumerate(requests):
            tokens = self._emitted(rows, draft, length, self._sampling.of(request))
            if tokens is None:
                return None
            emitted.append(tokens)
        return emitted

    @staticmethod
    def _emitted(
        rows: Sequence[tuple[_Logits, _Words]], draft: list[int], length: int, sampling: "RowSampling | None"
    ) -> list[int] | None:
        """Return the tokens of one request, or None if numpy cannot choose one. Later rows are not read."""
        tokens: list[int] = []
        for row in range(length + 1):
            logits, words = rows[row]
            if sampling is None:
                token = _most_likely(logits, words)
            else:
                token = _drawn(_allowed(logits, words), sampling._replace(position=sampling.position + row))
            if token is None:
                return None
            if token < 0:
                break
            tokens.append(token)
            if row < length and token != draft[row]:
                break
        return tokens


class _Drafting:
    def __init__(self, bound: _Bound) -> None:
        arrays, self._bound = bound.arrays, bound
        self._sampling = _Sampling(arrays)
        self._logits, self._token, self._target_ids = arrays["logits"], arrays["token"], arrays.get("target_ids")

    def run(self) -> None:
        """Run once."""
        tokens = [] if self._sampling.needs_graph() else [*map(self._column, range(len(self._logits)))]
        if not tokens or None in tokens:
            self._bound.graph.run()
        else:
            self._token[:] = tokens

    def _column(self, request: int) -> int | None:
        """Return the token of one request; -1: none is possible. None: numpy cannot choose one."""
        logits, sampling = self._logits[request, 0], self._sampling.of(request)
        if sampling is not None:
            return _drawn(logits, sampling, self._target_ids)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            return -1 if logits[best] == -np.inf else None
        return best if self._target_ids is None else int(self._target_ids[best])


class _Sampling:
    """The sampling parameters of a batch, which change between runs."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._values = [arrays[name] for name in SAMPLING_PARAMETERS if name != "rule"]
        self._temperature, self._rule = arrays["temperature"], arrays["rule"]
        self._is_wide = arrays["logits"].shape[-1] >= WIDE

    def needs_graph(self) -> bool:
        """Whether a request is sampled by the rejection rule, or from a small vocabulary."""
        sampled = self._temperature > 0
        return bool(sampled.any()) and not (self._is_wide and (self._rule[sampled] == Rule.COUPLED).all())

    def of(self, request: int) -> "RowSampling | None":
        """Return the parameters of a request; None if it is greedy."""
        if not self._temperature[request]:
            return None
        from tandemrt.runtime.device.backends.onnxruntime.token_choice import RowSampling

        temperature, top_n_sigma, top_k, top_p, min_p, seed, position = (values[request] for values in self._values)
        return RowSampling(temperature, top_n_sigma, int(top_k), top_p, min_p, int(seed), int(position))


def _drawn(logits: _Logits, sampling: "RowSampling", target_ids: npt.NDArray[np.int32] | None = None) -> int | None:
    """Return the token that the coupled rule draws; -1: no token is possible. None: there is infinity or NaN."""
    from tandemrt.runtime.device.backends.onnxruntime.token_choice import drawn_column

    peak = logits.max()
    if not np.isfinite(peak):
        return -1 if peak == -np.inf else None
    column = drawn_column(logits, sampling, target_ids)
    return column if target_ids is None else int(target_ids[column])


def _most_likely(logits: _Logits, words: _Words) -> int | None:
    """Return the most likely token of those whose bit in ``words`` is 1 (plugins/reference/bitmask.py).

    -1: no token is allowed. None: there is infinity or NaN, which cannot be chosen.
    """
    best = int(logits.argmax())
    is_allowed = int(words[best >> 5]) >> (best & 31) & 1  # the usual case, also with a grammar
    if is_allowed and -np.inf < logits[best] < np.inf:
        return best
    allowed = _bits(words, len(logits)).nonzero()[0]  # a grammar mostly allows few, so they are gathered
    if not len(allowed):
        return -1
    scores = logits[allowed]
    best = int(scores.argmax())
    if not scores[best] < np.inf:
        return None
    return int(allowed[best]) if scores[best] > -np.inf else -1


def _allowed(logits: _Logits, words: _Words) -> _Logits:
    """Return the logits with -inf for tokens whose bit in ``words`` is 0."""
    if (words == -1).all():
        return logits
    return np.where(_bits(words, len(logits)), logits, np.float32(-np.inf))


def _bits(words: _Words, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=count).view(np.bool_)
