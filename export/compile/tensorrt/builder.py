"""The builder of TensorRT and TensorRT-RTX: engines of the graphs with weights, and of verification by plugins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.engines.recipe.backends import CUDA
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.compile.backends import CompileOptions, engine_entry
from tandemrt.export.compile.tensorrt.engine import build_engine
from tandemrt.export.compile.tensorrt.other_python import build_elsewhere
from tandemrt.export.compile.tensorrt.profiles import Profile, decoder_profiles, fuse_profiles, head_profiles
from tandemrt.export.graph.graph import Graph
from tandemrt.plugins.tensorrt.bindings import widened

DECODERS = ("target", *DRAFT_LAYERS)
VERIFIERS = ("verify", "verify_probs")  # engines with the project's plugins


def build(graph: Graph, recipe: Recipe, folder: Path, options: CompileOptions) -> EngineEntry:
    """Compile a saved graph. A graph without an engine stays a graph: kernels or onnxruntime run it on the same GPU."""
    backend = recipe.backend
    assert isinstance(backend, TensorRt | TensorRtRtx)
    if graph.name in DECODERS:
        profiles = decoder_profiles(recipe)
    elif graph.name == "fuse":
        profiles = fuse_profiles(recipe)
    elif graph.sizes is not None:
        profiles = {"image": graph.sizes}
    elif backend.plugins and graph.name in VERIFIERS:
        profiles = head_profiles(recipe, graph.contract)
    else:
        return engine_entry(graph, graph.file, CUDA, backend.device)
    return _build_engine(graph, backend, folder, profiles, options)


def _build_engine(
    graph: Graph,
    backend: TensorRt | TensorRtRtx,
    folder: Path,
    profiles: Mapping[str, Profile],
    options: CompileOptions,
) -> EngineEntry:
    source, bindings = folder / graph.file, graph.contract
    engine = source.with_suffix(".engine")
    how: dict[str, Any] = {"profiles": profiles, "timing_cache": options.timing_cache}
    if isinstance(backend, TensorRt) and backend.python is not None:
        report = build_elsewhere(source, engine, backend, contract=bindings, **how)
    else:
        report = build_engine(source, engine, backend, progress=options.progress, **how)
    if lines := bindings.differences(widened(report.contract, bindings)):
        raise InternalError(f"{engine.name} must have the bindings of its contract: {'; '.join(lines)}")
    reported = backend.layer_set.reports_aliases
    if reported and (missing := set(bindings.aliases) - set(report.contract.aliases)):
        raise InternalError(f"{engine.name} must update its caches in place; {sorted(missing)} do not")
    entry = engine_entry(graph, engine.relative_to(folder).as_posix(), backend.name, report.built_for)
    return entry.model_copy(update={"reports_aliases": reported})
