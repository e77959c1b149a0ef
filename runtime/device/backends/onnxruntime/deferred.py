"""An engine that opens with its first call."""

from collections.abc import Callable, Mapping
from functools import cached_property

from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine


class DeferredEngine:
    """A graph on a CPU that ``open_graph`` opens when a round first needs it, so that a start is quicker."""

    capturable = False

    def __init__(self, contract: Contract, device: torch.device, open_graph: Callable[[], OnnxRuntimeEngine]) -> None:
        self.contract = contract
        self.device = device
        self._open_graph = open_graph

    @cached_property
    def _graph(self) -> OnnxRuntimeEngine:
        return self._open_graph()

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Call:
        """See Engine.bind."""
        return self._graph.bind(tensors, needs_probs=needs_probs)
