"""Compile a graph for the recipe's backend: run its passes, save it, and build its engine."""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.operators import EXPERTS, WEIGHTLESS_ENGINES
from tandemrt.engines.options.build_listener import Progress
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRecipe, quoted
from tandemrt.export.compile.graph_contract import require_contract
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.graph import Graph
from tandemrt.export.passes.batch_invariance import NotBatchInvariant
from tandemrt.export.passes.graph_pass import Pipeline
from tandemrt.export.passes.over_ranks import over_ranks
from tandemrt.export.passes.pipelines import BATCH_INVARIANT, PIPELINES, WITHOUT_LAYERS
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS

# Operators whose target is batch-invariant only if a recipe requires it, and why (docs/invariance.md)
_ON_REQUEST = {
    **dict.fromkeys(set(EXPERTS) - {"experts"}, "short prompts through quantized experts would be slower"),
    "int4_matmul": "short prompts through 4-bit weights would be slower",
    "int8_matmul": "short prompts through 8-bit weights would be slower",
    "float4_matmul": "short prompts through 4-bit weights would be slower",
    **{f"{kind}_matmul": "short prompts through weights of types K would be slower" for kind in K_QUANTS},
}


@dataclass(frozen=True)
class CompileOptions:
    """Compiler options that do not change the bundle: the timing cache file and a progress callback."""

    timing_cache: Path | None = None
    progress: Progress | None = None

    def require_use(self, recipe: Recipe) -> None:
        """Raise BadRecipe for an option that the recipe's backend ignores, or that would fail after the work."""
        file = self.timing_cache
        if file is None:
            return
        if not recipe.backend.times_kernels:
            names = " or ".join(repr(name) for name, backend in BACKENDS.items() if backend.times_kernels)
            rule = f"--timing-cache needs backend.name {names}"
            raise BadRecipe(f"{rule}; got {recipe.backend.name!r}, which measures nothing while it builds. Drop it")
        there = next(path for path in (file.absolute(), *file.absolute().parents) if path.exists())
        if there.is_dir() == (there == file.absolute()) or not os.access(there, os.W_OK):
            raise BadRecipe(f"--timing-cache must be a file that can be written; got {quoted(str(file))}. Name another")


DEFAULTS = CompileOptions()


def is_cut(graph: Graph, recipe: Recipe) -> bool:
    """Return whether the graph is cut into steps; only its subgraphs are saved then."""
    return graph.name not in WEIGHTLESS_ENGINES and recipe.cache == "paged"


@dataclass(frozen=True)
class CompiledEngine:
    """The engine of a graph, how many rewrites each pass made in the graph, and notes, one line each."""

    engine: EngineEntry
    rewrites: Mapping[str, int]
    notes: tuple[str, ...] = ()


def compile_graph(graph: Graph, recipe: Recipe, folder: Path, options: CompileOptions = DEFAULTS) -> CompiledEngine:
    """Build a graph, run its passes, save it in the bundle in ``folder``, and compile it.

    Raises InternalError when the graph breaks its contract, BackendUnavailable when the backend cannot build here.
    """
    lowered, backend = _lowered(graph, recipe), recipe.backend
    model, rewrites = lowered.model, lowered.rewrites
    if is_cut(graph, recipe):
        steps = importlib.import_module(f"tandemrt.export.compile.{backend.folder}.steps")
        entry = steps.build_in_steps(model, graph, backend, folder, batch_invariant=lowered.batch_invariant)
        return CompiledEngine(entry, rewrites, lowered.notes)
    save_model(model, folder / graph.file)
    require_contract(folder / graph.file, graph.contract)
    builder = importlib.import_module(f"tandemrt.export.compile.{backend.folder}.builder")
    return CompiledEngine(builder.build(graph, recipe, folder, options), rewrites)


def engine_entry(graph: Graph, file: str, backend: str, built_for: str, *, optimized: bool = False) -> EngineEntry:
    """Return the manifest's entry for the engine of a graph, in ``file``."""
    return EngineEntry(
        file=file,
        backend=backend,
        built_for=built_for,
        dtype=graph.dtype,
        contract=graph.contract,
        optimized=optimized,
    )


@dataclass(frozen=True)
class _Lowered:
    """A graph after its passes."""

    model: ir.Model
    rewrites: Mapping[str, int]
    batch_invariant: bool = False
    notes: tuple[str, ...] = ()


def _lowered(graph: Graph, recipe: Recipe) -> _Lowered:
    """Build a graph and run its passes. The target becomes batch-invariant if the recipe requires or allows it."""
    shard = graph.shard
    first = () if shard is None else over_ranks(shard.rank, shard.ranks, shard.is_split_by_inputs)
    model = graph.make()
    notes: tuple[str, ...] = ()
    if graph.name == "target" and recipe.batch_invariant is not False:  # a draft's rounding does not change the text
        try:
            if not recipe.batch_invariant and (why := _why_on_request(model, graph.dtype)):
                raise NotBatchInvariant(f"{why}; backend.batch_invariant = true requires equal bits")
            return _Lowered(model, BATCH_INVARIANT.after(*first)(model), batch_invariant=True)
        except NotBatchInvariant as error:
            if recipe.batch_invariant:
                raise
            notes = (f"target: speculation may change last bits, and so texts: {error.reason}",)
        model = graph.make()
    if graph.lowering is not None:
        pipeline = PIPELINES[graph.lowering]
    elif graph.name not in WEIGHTLESS_ENGINES:
        pipeline = WITHOUT_LAYERS.get(recipe.backend.lowering, Pipeline())
    else:
        pipeline = Pipeline()
    return _Lowered(model, pipeline.after(*first)(model), notes=notes)


def _why_on_request(model: ir.Model, dtype: str) -> str | None:
    """Return why a target is not batch-invariant by default, if it is not."""
    if dtype == "float32":
        return "few rows of float32 matmuls would be slower"
    present = {node.op_type for node in model.graph}
    return next((why for operator, why in _ON_REQUEST.items() if operator in present), None)
