"""The builder of onnxruntime: a saved graph is the engine."""

from pathlib import Path

from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.compile.backends import CompileOptions, engine_entry
from tandemrt.export.compile.onnxruntime.graph_file import mapped_weights, require_session
from tandemrt.export.graph.graph import Graph


def build(graph: Graph, recipe: Recipe, folder: Path, options: CompileOptions) -> EngineEntry:  # noqa: ARG001
    """Return the entry of a saved graph. One for a CPU is checked in a session, and optimized."""
    backend, file = recipe.backend, folder / graph.file
    if backend.device != "cpu":
        return engine_entry(graph, graph.file, backend.name, backend.device)
    optimized = require_session(file, optimize=graph.dtype == "float32")
    entry = engine_entry(graph, graph.file, backend.name, backend.device, optimized=optimized)
    return entry.model_copy(update={"shared": mapped_weights(file, folder)})
