"""Pieces of a round as CUDA graphs: captured once per shape, checked, and replayed without Python in between.

A piece is a sequence of enqueues on the current stream whose tensors never move. It must be the same work every time
it is asked for by one key: only what the tensors hold may change.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

from tandemrt.engines.calls import QUICK
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.metrics import Metrics

MOST_PROMPTS = 128  # shapes with prompts that are known, as graphs or as having occurred
WARM_UPS = 3  # engines choose kernels, grow their arenas and set up libraries in their first runs

log = logging.getLogger(__name__)


class Graphs:
    """Runs pieces; on a CUDA device by replaying graphs, made when a piece is first asked for.

    ``enabled`` False, a piece that cannot be captured, and a CPU run the piece as it is. What ran so is counted by
    reason in ``Metrics.eager_runs``: ``cpu``, ``off``, ``engine`` (one that reads on the host), ``prompts`` (pieces
    with prompts that are large, or whose shape is new), ``capture-failed``, ``capture-mismatch``.
    """

    def __init__(self, device: torch.device, metrics: Metrics, *, enabled: bool = True) -> None:
        self._device = device
        self._metrics = metrics
        self._off = "cpu" if device.type != "cuda" else "" if enabled else "off"
        self._graphs: dict[Hashable, Any] = {}  # a torch.cuda.CUDAGraph, or why there is none
        self._prompts: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()  # the same and what it keeps, newest last

    def run(
        self,
        key: Hashable,
        work: Callable[[], None],
        *,
        outputs: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor] = (),
        capturable: bool = True,
    ) -> None:
        """Run ``work``, which writes ``outputs`` whole and moves ``state`` on from where it stands.

        All else that it writes must come out the same when it runs again from the same ``state``.
        """
        if self._off or not capturable:
            self.run_eagerly(work, "engine")
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = self._capture(key, work, outputs, state)
        elif isinstance(graph, str):
            self.run_eagerly(work, graph)
        else:
            graph.replay()
            self._metrics.graph_replays += 1

    def run_with_prompts(
        self, key: Hashable, work: Callable[[], None], keep: Any, *, tokens: int, capturable: bool = True
    ) -> None:
        """Run ``work`` with prompts, of which there are many shapes: captured when one occurs for the second time.

        Of more than QUICK ``tokens``, a capture would take longer than it ever saves, and they run eagerly. The call is
        enqueued first, so that the device computes it meanwhile. It changes no state, and its engines have run in this
        size, so neither warm-up nor check is needed. The least recent graphs are given up; ``keep`` is what the graph
        reads and writes, and is kept with the graph that was captured of it, whatever later calls bring.
        """
        if self._off or not capturable or tokens > QUICK:
            self.run_eagerly(work, "prompts")
            return
        graph, kept = self._prompts.pop(key, (None, None))
        if isinstance(graph, torch.cuda.CUDAGraph):
            graph.replay()
            keep = kept
            self._metrics.graph_replays += 1
        else:
            self.run_eagerly(work, graph or "prompts")
        if graph == "prompts":
            graph = self._try_capture(key, work)
        self._prompts[key] = graph or "prompts", keep
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def _try_capture(self, key: Hashable, work: Callable[[], None]) -> Any:
        try:
            graph: Any = _captured(work, waits=False)
        except Exception as error:  # torch, onnxruntime and cuda-core have families of their own
            log.warning("piece %s cannot be captured, it runs eagerly: %s", key, error)
            return "capture-failed"
        self._metrics.graphs_captured += 1
        return graph

    def run_eagerly(self, work: Callable[[], None], reason: str) -> None:
        """Run ``work`` as it is, for a ``reason`` of its own where graphs could be made."""
        work()
        reason = self._off or reason
        self._metrics.eager_runs[reason] = self._metrics.eager_runs.get(reason, 0) + 1

    def _capture(
        self, key: Hashable, work: Callable[[], None], outputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor]
    ) -> Any:
        """Warm up, capture, check, and leave behind what one run of ``work`` leaves. Returns the graph or a reason."""
        before = [tensor.clone() for tensor in state]
        for _ in range(WARM_UPS):
            _restore(state, before)
            work()
        expected = [tensor.clone() for tensor in (*outputs, *state)]
        _restore(state, before)
        try:
            graph: Any = _captured(work)
            for tensor in outputs:  # a graph that writes nothing must not pass for what the warm-up left
                _poison(tensor)
            graph.replay()
            torch.cuda.current_stream(self._device).synchronize()
            reason = "" if all(map(same_bits, (*outputs, *state), expected)) else "capture-mismatch"
        except Exception as error:  # torch, onnxruntime and cuda-core have families of their own
            log.warning("piece %s cannot be captured, it runs eagerly: %s", key, error)
            reason = "capture-failed"
        if not reason:
            self._metrics.graphs_captured += 1
            return graph
        if reason == "capture-mismatch":
            log.warning("piece %s: its graph does not repeat what it captured, it runs eagerly", key)
        _restore(state, before)
        self.run_eagerly(work, reason)
        return reason


def _captured(work: Callable[[], None], *, waits: bool = True) -> Any:
    """``waits``: for what the device is doing, and give back what torch's allocator holds."""
    graph = torch.cuda.CUDAGraph()  # with memory of its own: torch does not take a shared pool back after a failure
    # Relaxed: other threads may use CUDA meanwhile, and libraries may allocate; neither becomes part of the graph.
    collecting = gc.isenabled()
    gc.disable()  # garbage may own device memory or library handles, and a capture does not survive their release
    try:
        if waits:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                work()
            return graph
        graph.capture_begin(capture_error_mode="relaxed")
        with ExitStack() as always:
            always.callback(graph.capture_end)
            work()
    finally:
        if collecting:
            gc.enable()
    return graph


def _restore(state: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    for tensor, values in zip(state, before, strict=True):
        tensor.copy_(values)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits, NaNs included."""
    return torch.equal(*(viewed(each.contiguous(), torch.uint8) for each in (found, expected)))
