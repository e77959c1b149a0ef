"""Description of a graph of a bundle: its builder function and its contract."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.calls import Use
from tandemrt.engines.contract.contract import Contract
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.read.shard import Shard


@dataclass(frozen=True)
class Graph:
    """One graph to build.

    Attributes:
        name: of the engine that the graph becomes.
        file: path of the graph file in the bundle.
        dtype: compute dtype.
        contract: names, dtypes and shapes of its inputs and outputs.
        make: builds the graph, before any pass.
        lowering: lowering of its decoder layers, which selects the passes; None: it has no decoder layers.
        shard: the part of one rank of a tensor-parallel target; None: one process runs the graph.
        sizes: of the symbols of its inputs; None: they follow from the recipe.
    """

    name: EngineName
    file: str
    dtype: str
    contract: Contract
    make: Callable[[], ir.Model]
    lowering: Lowering | None = None
    shard: Shard | None = None
    sizes: Use | None = None
