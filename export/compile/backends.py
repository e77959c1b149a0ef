"""One door to the compilers: which lowering a backend needs, and what makes an engine out of a graph."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from tandemrt.engines.decoder import Decoder, Piece
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.engines.errors import BadRecipe, InternalError, quoted
from tandemrt.engines.manifest import Engine
from tandemrt.engines.recipe import Recipe
from tandemrt.engines.tensorrt.recipe import TensorRt, TensorRtRtx
from tandemrt.export.compile import onnxruntime
from tandemrt.export.compile.tensorrt.engine import build_engine
from tandemrt.export.compile.tensorrt.listeners import Progress
from tandemrt.export.compile.tensorrt.profiles import Profile, decoder_profiles, head_profiles
from tandemrt.export.model.builder import save_model
from tandemrt.export.model.graph import Graph
from tandemrt.export.passes.batch_invariant import make_batch_invariant
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.products import fuse_transposed_products
from tandemrt.plugins.operators import DOMAIN

DECODERS = ("target", "draft")
IN_STEPS = ("target", *DRAFT_LAYERS, "context", "fuse", "markov")  # over a paged cache
VERIFIERS = ("verify", "verify_probs")  # what TensorRT builds with our plugins; TensorRT-RTX has none


@dataclass(frozen=True)
class CompileOptions:
    """What a compiler may be told that changes no bundle: where it keeps its timings, who hears of its progress."""

    timing_cache: Path | None = None
    progress: Progress | None = None

    def require_use(self, recipe: Recipe) -> None:
        """Raise BadRecipe for an option that the recipe's backend would ignore, or that would fail after the work."""
        file = self.timing_cache
        if file is None:
            return
        if not isinstance(recipe.backend, TensorRt):
            rule = "--timing-cache needs backend.name 'tensorrt'"
            raise BadRecipe(f"{rule}; got {recipe.backend.name!r}, which measures nothing while it builds. Drop it")
        there = next(path for path in (file.absolute(), *file.absolute().parents) if path.exists())
        if there.is_dir() == (there == file.absolute()) or not os.access(there, os.W_OK):
            raise BadRecipe(f"--timing-cache must be a file that can be written; got {quoted(str(file))}. Name another")


DEFAULTS = CompileOptions()


def is_cut(graph: Graph, recipe: Recipe) -> bool:
    """Whether the graph becomes a decoder in steps: its pieces are saved, and not the whole."""
    return graph.name in IN_STEPS and recipe.cache == "paged"


def compile_graph(graph: Graph, recipe: Recipe, folder: Path, options: CompileOptions = DEFAULTS) -> Engine:
    """Build a graph, save it in the bundle in ``folder``, compile it and return its entry.

    Raises InternalError when the graph breaks its contract, BackendUnavailable when the backend cannot build here.
    """
    if is_cut(graph, recipe):
        return _in_steps(graph, recipe, folder)
    save_model(graph.make(), folder / graph.file)
    onnxruntime.require_contract(folder / graph.file, graph.contract)
    if isinstance(recipe.backend, TensorRt | TensorRtRtx):
        if graph.name in DECODERS:
            return _tensorrt(graph, recipe.backend, folder, decoder_profiles(recipe), options)
        if isinstance(recipe.backend, TensorRt) and graph.name in VERIFIERS:
            return _tensorrt(graph, recipe.backend, folder, head_profiles(recipe, graph.contract), options)
        return _entry(graph, graph.file, "onnxruntime-cuda", "cuda")
    if recipe.backend.name == "onnxruntime-cpu":
        onnxruntime.require_session(folder / graph.file)
        return _entry(graph, graph.file, recipe.backend.name, "cpu")
    return _entry(graph, graph.file, recipe.backend.name, "cuda")


def _in_steps(graph: Graph, recipe: Recipe, folder: Path) -> Engine:
    """Save the pieces of a graph instead of the whole; without operators of the project it is the only piece."""
    model = graph.make()
    batch_invariant = recipe.batch_invariant and graph.name == "target"  # no text depends on what a draft rounds
    if batch_invariant:
        make_batch_invariant(model)
    fuse_transposed_products(model)
    if not any(node.domain == DOMAIN for node in model.graph):
        return _one_piece(model, graph, recipe.backend.name, folder)
    beside = str(PurePosixPath(graph.file).parent)
    pieces, decoder = cut(model, beside, "" if graph.name in DECODERS else f"{graph.name}.")
    for file, piece in pieces.items():
        save_model(piece, folder / file)
    for each in decoder.pieces:
        onnxruntime.require_contract(folder / each.file, decoder.contract_of(each, graph.contract))
    return Engine(
        decoder=decoder,
        backend=recipe.backend.name,
        built_for="cuda",
        dtype=graph.dtype,
        contract=graph.contract,
        batch_invariant=batch_invariant,
    )


def _one_piece(model: ir.Model, graph: Graph, backend: str, folder: Path) -> Engine:
    """Save a graph as the only step of a decoder, which runs without a wait."""
    save_model(model, folder / graph.file)
    onnxruntime.require_contract(folder / graph.file, graph.contract)
    inputs, outputs = (tuple(b.name for b in side) for side in (graph.contract.inputs, graph.contract.outputs))
    decoder = Decoder(constants=None, steps=(Piece(file=graph.file, inputs=inputs, outputs=outputs),), values=())
    return Engine(decoder=decoder, backend=backend, built_for="cuda", dtype=graph.dtype, contract=graph.contract)


def _tensorrt(
    graph: Graph,
    backend: TensorRt | TensorRtRtx,
    folder: Path,
    profiles: Mapping[str, Profile],
    options: CompileOptions,
) -> Engine:
    source = folder / graph.file
    report = build_engine(
        source,
        source.with_suffix(".engine"),
        backend,
        profiles=profiles,
        timing_cache=options.timing_cache,
        progress=options.progress,
    )
    lines = graph.contract.differences(report.contract)
    if lines:
        raise InternalError(f"{report.path.name} must have the bindings of its contract: {'; '.join(lines)}")
    if missing := set(graph.contract.aliases) - set(report.contract.aliases):
        raise InternalError(f"{report.path.name} must update its caches in place; {sorted(missing)} do not")
    return _entry(graph, report.path.relative_to(folder).as_posix(), backend.name, report.built_for)


def _entry(graph: Graph, file: str, backend: str, built_for: str) -> Engine:
    return Engine(file=file, backend=backend, built_for=built_for, dtype=graph.dtype, contract=graph.contract)
