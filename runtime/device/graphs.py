"""CUDA graphs of the phases of a round: captured once per shape, checked bit by bit, and replayed.

A phase is a sequence of kernel launches on the current stream, on tensors that keep their addresses. A key always
stands for the same launches; only the contents of the tensors may change.
"""

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.device import Device
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.metrics.metrics import Metrics

MAX_PROMPT_GRAPHS = 128  # shapes with prompts that are remembered, both captured ones and those seen once
WARM_UPS = 3  # in their first runs, engines choose kernels, grow their arenas and initialize libraries

log = logging.getLogger(__name__)
# One capture at a time in a process: torch waits for the device before each, which would break another.
_capturing = threading.RLock()


class Graphs:
    """Runs phases. On a CUDA device, the first run of a key captures a graph, and later runs replay it.

    A phase runs eagerly on a CPU, with ``enabled`` False, and if it cannot be captured. ``Metrics.eager_runs`` counts
    eager runs by reason: ``cpu``, ``off``, ``engine`` (an engine reads on the host), ``prompts`` (many tokens, or a
    new shape), ``masks`` (masked drafts), ``capture-failed``, ``capture-mismatch``.
    """

    def __init__(self, device: torch.device, metrics: Metrics | None = None, *, enabled: bool = True) -> None:
        self._device = device_of(device)
        self.metrics = Metrics() if metrics is None else metrics
        self._disabled = "cpu" if self._device.on_host else "" if enabled else "off"
        self._graphs: dict[Hashable, Any] = {}  # by key: a graph of the device, or the reason for eager runs
        # By key: the same, and the objects whose memory the graph uses; most recently used last.
        self._prompts: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self._prompt_memory: Any = None  # what those graphs allocate: they run one after another, so they share it

    def run(
        self,
        key: Hashable,
        work: Callable[[], None],
        *,
        outputs: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor] = (),
        capturable: bool = True,
    ) -> None:
        """Run ``work``, which overwrites all of ``outputs`` and updates ``state`` in place.

        ``work`` must be deterministic: from the same ``state`` it writes the same values.
        """
        if self._disabled or not capturable:
            self.run_eagerly(work, "engine")
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = self._capture(key, work, outputs, state)
        elif isinstance(graph, str):
            self.run_eagerly(work, graph)
        else:
            graph.replay()
            self.metrics.graph_replays += 1

    def run_with_prompts(self, key: Hashable, work: Callable[[], None], keep: Any, *, capturable: bool = True) -> None:
        """Run ``work`` that processes prompts. There are many shapes; each is captured when it occurs a second time.

        A capture follows an eager run of the same work, so that the device is busy meanwhile. It needs neither warm-up
        nor check, because the work has run before and changes no state. The least recently used graphs are dropped.
        ``keep``: the objects whose memory the graph uses; they live as long as the graph.
        """
        if self._disabled or not capturable:
            self.run_eagerly(work, "prompts")
            return
        graph, kept = self._prompts.pop(key, (None, None))
        if self._device.is_graph(graph):
            graph.replay()
            keep = kept
            self.metrics.graph_replays += 1
        else:
            self.run_eagerly(work, graph or "prompts")
        if graph == "prompts":
            graph = self._try_capture(key, work)
        self._prompts[key] = graph or "prompts", keep
        if len(self._prompts) > MAX_PROMPT_GRAPHS:
            self._prompts.popitem(last=False)

    def _try_capture(self, key: Hashable, work: Callable[[], None]) -> Any:
        try:
            if self._prompt_memory is None:
                self._prompt_memory = self._device.graph_memory()
            graph: Any = captured(self._device, work, waits=False, memory=self._prompt_memory)
        except Exception as error:  # torch, onnxruntime and cuda-core share no base class
            log.warning("phase %s cannot be captured and runs eagerly: %s", key, error)
            self._prompt_memory = None  # torch cannot use it again after a failure
            return "capture-failed"
        self.metrics.graphs_captured += 1
        return graph

    def run_eagerly(self, work: Callable[[], None], reason: str) -> None:
        """Run ``work`` without a graph, and count ``reason``; "cpu" or "off" take precedence over it."""
        work()
        reason = self._disabled or reason
        self.metrics.eager_runs[reason] = self.metrics.eager_runs.get(reason, 0) + 1

    def _capture(
        self, key: Hashable, work: Callable[[], None], outputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor]
    ) -> Any:
        """Warm up, capture and check a graph; return it, or the reason for eager runs. Has the effect of one run."""
        before = [tensor.clone() for tensor in state]
        for _ in range(WARM_UPS):
            _restore(state, before)
            work()
        expected = [tensor.clone() for tensor in (*outputs, *state)]
        _restore(state, before)
        try:
            graph: Any = captured(self._device, work)
            for tensor in outputs:  # so that a graph that writes nothing cannot pass the check
                _poison(tensor)
            graph.replay()
            self._device.synchronize()
            reason = "" if all(map(same_bits, (*outputs, *state), expected)) else "capture-mismatch"
        except Exception as error:  # torch, onnxruntime and cuda-core share no base class
            log.warning("phase %s cannot be captured and runs eagerly: %s", key, error)
            reason = "capture-failed"
        if not reason:
            self.metrics.graphs_captured += 1
            return graph
        if reason == "capture-mismatch":
            log.warning("phase %s: its CUDA graph gives other bits than the eager run; it runs eagerly", key)
        _restore(state, before)
        self.run_eagerly(work, reason)
        return reason


def captured(device: Device, work: Callable[[], None], *, waits: bool = True, memory: Any = None) -> Any:
    """Return a graph of ``work``, after captures of other threads.

    ``waits``: first wait for the device, and release the free memory of torch's allocator. ``memory``: a handle of the
    pool that a capture that does not wait allocates from; None: its own.
    """
    with _capturing, _uncollected():
        return device.capture(work, waits=waits, memory=memory)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection: releasing device memory or library handles would break a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _restore(state: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    for tensor, values in zip(state, before, strict=True):
        tensor.copy_(values)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


def same_bits(actual: Any, expected: Any) -> bool:
    """Return whether two torch tensors of the same dtype and shape are bitwise equal, including NaNs."""
    bits: list[Any] = [viewed(each.contiguous(), torch.uint8) for each in (actual, expected)]
    return torch.equal(*bits)
