"""One door to the compilers: which lowering a backend needs, and what makes an engine out of a graph."""

from pathlib import Path

from tandemrt.engines.errors import InternalError
from tandemrt.engines.manifest import Engine
from tandemrt.engines.recipe import Recipe, TensorRtRtx
from tandemrt.export.blocks import Lowering
from tandemrt.export.compile import onnxruntime
from tandemrt.export.compile.tensorrt import Profile, Range, build_engine
from tandemrt.export.graphs import Graph

DECODERS = ("target", "draft")


def attention_of(recipe: Recipe) -> Lowering:
    """Return the lowering of attention that the recipe's backend was seen to run right.

    On a CUDA device the length form is the faster one; the mask form is the one whose text was compared there
    (docs/benchmarks.md).
    """
    return "length" if recipe.backend.name == "onnxruntime-cpu" else "mask"


def compile_graph(graph: Graph, recipe: Recipe, folder: Path) -> Engine:
    """Compile a saved graph of the bundle in ``folder`` and return its entry.

    Raises InternalError when the graph breaks its contract, BackendUnavailable when the backend cannot build here.
    """
    onnxruntime.require_contract(folder / graph.file, graph.contract)
    if isinstance(recipe.backend, TensorRtRtx):
        if graph.name in DECODERS:
            return _tensorrt_rtx(graph, recipe, recipe.backend, folder)
        return _entry(graph, graph.file, "onnxruntime-cpu", "cpu")
    if recipe.backend.name == "onnxruntime-cpu":
        onnxruntime.require_session(folder / graph.file)
        return _entry(graph, graph.file, recipe.backend.name, "cpu")
    return _entry(graph, graph.file, recipe.backend.name, "cuda")


def profiles(recipe: Recipe) -> tuple[Profile, Profile]:
    """Return the sizes an engine is tuned for: a round (a window for every slot), and prefill (a chunk for one)."""
    batch, window, chunk = recipe.limits.batch, recipe.draft.window + 1, recipe.limits.prefill_chunk
    rows = Range(1, window, window)
    decode = {"batch": Range(1, batch, batch), "query": Range(1, window, window), "rows": rows}
    prefill = {"batch": Range(1, 1, batch), "query": Range(1, chunk, max(chunk, window)), "rows": Range(1, 1, window)}
    return decode, prefill


def _tensorrt_rtx(graph: Graph, recipe: Recipe, backend: TensorRtRtx, folder: Path) -> Engine:
    source = folder / graph.file
    report = build_engine(
        source,
        source.with_suffix(".engine"),
        profiles=profiles(recipe),
        compute_capabilities=backend.compute_capabilities,
    )
    lines = graph.contract.differences(report.contract)
    if lines:
        raise InternalError(f"{report.path.name} must have the bindings of its contract: {'; '.join(lines)}")
    target = "+".join(f"sm_{capability.replace('.', '')}" for capability in backend.compute_capabilities)
    return _entry(graph, report.path.relative_to(folder).as_posix(), backend.name, target)


def _entry(graph: Graph, file: str, backend: str, target: str) -> Engine:
    return Engine(file=file, backend=backend, target=target, dtype=graph.dtype, contract=graph.contract)
