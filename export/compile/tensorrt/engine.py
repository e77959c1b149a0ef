"""Build TensorRT engines from ONNX: for TensorRT on a GPU, and for TensorRT-RTX ahead of time without one.

The graph should be in the lowering of the options' layer set. In a *mask* graph, the builder turns Attention,
RotaryEmbedding and TensorScatter into its own layers. A report of the result is next to the engine, as
``NAME.inspect.json``.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.options.build_listener import Progress
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.compile.tensorrt import inspect as inspector
from tandemrt.export.compile.tensorrt.config import configure, gpu, load_timings, save_timings, timing_cache_file
from tandemrt.export.compile.tensorrt.listeners import progress_monitor
from tandemrt.export.compile.tensorrt.network import contract_of, inputs, parse, symbols
from tandemrt.export.compile.tensorrt.profiles import Profile, optimization_profile, resolve
from tandemrt.export.compile.tensorrt.worker import Failed, count_layers
from tandemrt.plugins.tensorrt.modules import load_builder, logger
from tandemrt.plugins.tensorrt.operators import PLUGINS
from tandemrt.plugins.tensorrt.register import register


@dataclass(frozen=True)
class EngineReport:
    """A built engine. ``layers`` counts the network's layers by kind; ``contract`` is the bindings of the engine."""

    path: Path
    inspection: Path
    compiler: str
    built_for: str
    layers: Mapping[str, int]
    contract: Contract
    nbytes: int
    seconds: float


def build_engine(
    onnx_path: Path,
    engine_path: Path,
    options: TensorRt | TensorRtRtx,
    *,
    profiles: Mapping[str, Profile],
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> EngineReport:
    """Compile ``onnx_path`` into ``engine_path``, which appears only when it is complete.

    Every profile, named after its use, gives a range to each symbol of the graph's inputs; one engine serves all
    profiles. ``timing_cache`` keeps TensorRT's measurements for the next build (None: a file in the user's cache
    folder); TensorRT-RTX measures nothing ahead of time. ``progress`` receives every step of every phase.

    Raises BackendUnavailable if the compiler is not installed or cannot compile the graph, with the node, the cause and
    the fix. Raises BadRecipe for a compute capability or a range that the compiler does not accept.
    """
    if not profiles:
        raise BadRecipe("profiles must hold at least one profile; got none")
    begin = time.perf_counter()
    trt = load_builder(options.name)
    if isinstance(options, TensorRt):
        require_layers(trt.__version__, options)
        gpu()  # checked first: without a working CUDA, TensorRT 11.4 returns an object that crashes when it is freed
        if options.plugins:
            register(PLUGINS)  # the parser takes a plugin only if it is registered by then
    builder = _builder(trt, options.name)
    network = parse(trt, builder, onnx_path)
    config = builder.create_builder_config()
    try:
        built_for = configure(trt, config, options)
    except Failed as error:
        raise BackendUnavailable(f"{options.name} {trt.__version__} cannot compile {onnx_path}: {error}") from error
    timings = (timing_cache or timing_cache_file(trt.__version__)) if isinstance(options, TensorRt) else None
    if timings:
        load_timings(config, timings)
    shapes = {tensor.name: symbols(tensor) for tensor in inputs(network)}
    for profile in profiles.values():
        config.add_optimization_profile(optimization_profile(builder, shapes, profile))
    if progress is not None:
        config.progress_monitor = progress_monitor(trt, progress)
    log = logger(trt)
    log.clear()
    plan = builder.build_serialized_network(network, config)
    compiler = f"{options.name} {trt.__version__}"
    if plan is None:
        raise BackendUnavailable(f"{compiler} cannot compile {onnx_path}: {log.summary()}")
    if timings:
        with nullcontext() if timing_cache else suppress(OSError):  # the default file in the user's folder is optional
            save_timings(config, timings)
    _write(engine_path, plan)
    layers = count_layers(network)
    inspection = inspector.write(
        engine_path,
        compiler=compiler,
        built_for=built_for,
        layers=layers,
        profiles={name: resolve(shapes, profile) for name, profile in profiles.items()},
        opened=inspector.opened_here(trt, engine_path, built_for, len(profiles)),
    )
    return EngineReport(
        path=engine_path,
        inspection=inspection,
        compiler=compiler,
        built_for=built_for,
        layers=layers,
        contract=contract_of(network),
        nbytes=engine_path.stat().st_size,
        seconds=time.perf_counter() - begin,
    )


def require_layers(version: str, options: TensorRt) -> None:
    """Raise BadRecipe unless TensorRT ``version`` has the layers that the recipe asks for."""
    oldest = options.layer_set.oldest
    if tuple(map(int, version.split(".")[:2])) < oldest:
        fix = 'write layers = "basic", or ' if options.layers == "native" else ""
        raise BadRecipe(
            f"backend.layers {options.layers!r} needs TensorRT {'.'.join(map(str, oldest))} or later; got {version}; "
            f"{fix}name the interpreter of a later release in backend.python"
        )


def _builder(trt: Any, backend: str) -> Any:
    log = logger(trt)
    log.clear()
    try:
        builder = trt.Builder(log)
    except TypeError:  # pybind11 raises it if the factory returns nothing
        builder = None
    if builder is None or log.errors:
        raise BackendUnavailable(f"{backend} {trt.__version__} cannot start its builder: {log.summary()}")
    return builder


def _write(path: Path, plan: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(plan)
    partial.replace(path)
