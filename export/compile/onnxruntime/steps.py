"""Save a graph that is cut at the operators of the project: the runtime runs its steps one by one."""

from pathlib import Path, PurePosixPath

import onnx_ir as ir

from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.decoder import Decoder, Subgraph
from tandemrt.engines.recipe.backend import Backend
from tandemrt.export.compile.graph_contract import require_contract
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.graph import Graph
from tandemrt.export.passes.cut import cut
from tandemrt.plugins.operators.constants import DOMAIN


def build_in_steps(
    model: ir.Model, graph: Graph, backend: Backend, folder: Path, *, batch_invariant: bool
) -> EngineEntry:
    """Save the subgraphs of ``model``, the graph after its passes, in the bundle in ``folder``.

    A graph without operators of the project is a single subgraph.
    """
    if not any(node.domain == DOMAIN for node in model.graph):
        return _one_subgraph(model, graph, backend, folder)
    folder_in_bundle = str(PurePosixPath(graph.file).parent)
    prefix = "" if graph.name in ("target", "draft") else f"{graph.name}."  # the others share the draft's folder
    if graph.shard is not None and graph.shard.rank:
        prefix = f"rank{graph.shard.rank}."
    subgraphs, decoder = cut(model, folder_in_bundle, prefix)
    for file, part in subgraphs.items():
        save_model(part, folder / file)
    for subgraph in decoder.subgraphs:
        require_contract(folder / subgraph.file, decoder.contract_of(subgraph, graph.contract))
    return _entry(decoder, graph, backend, batch_invariant=batch_invariant)


def _one_subgraph(model: ir.Model, graph: Graph, backend: Backend, folder: Path) -> EngineEntry:
    save_model(model, folder / graph.file)
    require_contract(folder / graph.file, graph.contract)
    inputs, outputs = (tuple(b.name for b in side) for side in (graph.contract.inputs, graph.contract.outputs))
    decoder = Decoder(constants=None, steps=(Subgraph(file=graph.file, inputs=inputs, outputs=outputs),), values=())
    return _entry(decoder, graph, backend, batch_invariant=False)


def _entry(decoder: Decoder, graph: Graph, backend: Backend, *, batch_invariant: bool) -> EngineEntry:
    return EngineEntry(
        decoder=decoder,
        backend=backend.name,
        built_for=backend.device,
        dtype=graph.dtype,
        contract=graph.contract,
        batch_invariant=batch_invariant,
    )
