"""Compile a graph with TensorRT-RTX, ahead of time and without a GPU: one engine file for several compute capabilities.

The graph should be in the *mask* lowering of export/decoder.py. The builder turns Attention, RotaryEmbedding and
TensorScatter into layers of its own; the report counts them, and says which outputs update an input in place.
"""

import importlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tandemrt.engines.contract import Binding, Contract
from tandemrt.engines.errors import BackendUnavailable, BadRecipe
from tandemrt.export.compile.tensorrt_listeners import Progress, collecting_logger, progress_monitor


class Range(NamedTuple):
    """The sizes a symbolic dimension may take; ``best`` is the one the engine is tuned for."""

    least: int
    best: int
    most: int


Profile = Mapping[str, Range]  # symbol of the contract (batch, query, rows) -> sizes


@dataclass(frozen=True)
class EngineReport:
    """What was built. ``layers`` counts the network's layers by kind; ``contract`` is what the engine binds."""

    path: Path
    compiler: str
    compute_capabilities: tuple[str, ...]
    layers: Mapping[str, int]
    contract: Contract
    nbytes: int
    seconds: float


def build_engine(
    onnx_path: Path,
    engine_path: Path,
    *,
    profiles: Sequence[Profile],
    compute_capabilities: Sequence[str],
    backend: str = "tensorrt-rtx",
    progress: Progress | None = None,
) -> EngineReport:
    """Compile ``onnx_path`` into ``engine_path``, which appears only when it is complete.

    Every profile gives a range to each symbol of the graph's inputs; one engine serves all profiles.
    ``compute_capabilities`` are written as NVIDIA writes them, "8.6".

    Raises BackendUnavailable if the compiler is not installed or cannot compile the graph, with the node and the
    cause, and BadRecipe for a compute capability or a range that it does not accept.
    """
    trt = load_compiler(backend)
    targets = [_compute_capability(trt, backend, text) for text in compute_capabilities]
    if not targets or len(set(targets)) < len(targets):
        raise BadRecipe(f"compute_capabilities should be distinct and at least one, received {compute_capabilities}")
    if not profiles:
        raise BadRecipe("profiles should hold at least one profile, received none")
    begin = time.perf_counter()
    logger = collecting_logger(trt)
    builder = trt.Builder(logger)
    network = _parse(trt, builder, logger, onnx_path)
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(targets)
    for position, target in enumerate(targets):
        if not config.set_compute_capability(target, position):
            raise BadRecipe(
                f"compute_capabilities: {backend} refuses {compute_capabilities[position]}: {logger.said()}"
            )
    for profile in profiles:
        config.add_optimization_profile(_optimization_profile(builder, network, profile))
    if progress is not None:
        config.progress_monitor = progress_monitor(trt, progress)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendUnavailable(f"{backend} {trt.__version__} cannot compile {onnx_path}: {logger.said()}")
    partial = engine_path.with_name(engine_path.name + ".partial")
    partial.write_bytes(plan)
    partial.replace(engine_path)
    return EngineReport(
        path=engine_path,
        compiler=f"{backend} {trt.__version__}",
        compute_capabilities=tuple(compute_capabilities),
        layers=dict(Counter(layer.type.name for layer in _layers(network))),
        contract=_contract(trt, network),
        nbytes=engine_path.stat().st_size,
        seconds=time.perf_counter() - begin,
    )


def load_compiler(backend: str) -> ModuleType:
    """Import the builder's Python module. Raises BackendUnavailable, with the command that installs it."""
    if backend not in _MODULES:
        raise BadRecipe(f"backend should be one of {', '.join(_MODULES)}, received {backend!r}")
    try:
        return importlib.import_module(_MODULES[backend])
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {backend} needs the module {_MODULES[backend]}, which cannot be imported ({error}); "
            f"pip install 'tandemrt[{backend}]'"
        ) from error


_MODULES = {"tensorrt-rtx": "tensorrt_rtx_bindings"}
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}


def _compute_capability(trt: Any, backend: str, text: str) -> Any:
    known = {
        f"{name[2:-1]}.{name[-1]}": value
        for name, value in trt.ComputeCapability.__members__.items()
        if name.startswith("SM")
    }
    if text not in known:
        raise BadRecipe(
            f"compute_capabilities: {backend} {trt.__version__} does not support {text!r}; "
            f"supported: {', '.join(known)}"
        )
    return known[text]


def _parse(trt: Any, builder: Any, logger: Any, onnx_path: Path) -> Any:
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        shown = "; ".join(
            f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" if e.node_name() else e.desc() for e in errors
        )
        raise BackendUnavailable(f"{trt.__name__} {trt.__version__} cannot read {onnx_path}: {shown}; {logger.said()}")
    return network


def _optimization_profile(builder: Any, network: Any, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for tensor in _inputs(network):
        symbols = _symbols(tensor)
        if missing := [dim for dim in symbols if isinstance(dim, str) and dim not in profile]:
            raise BadRecipe(f"profile: input {tensor.name} has the dimension {missing[0]!r}, which has no range")
        ranges = [Range(dim, dim, dim) if isinstance(dim, int) else Range(*profile[dim]) for dim in symbols]
        if wrong := [f"{d} {tuple(r)}" for d, r in zip(symbols, ranges, strict=True) if not 1 <= r[0] <= r[1] <= r[2]]:
            raise BadRecipe(f"profile: a range should be 1 <= least <= best <= most, received {wrong[0]}")
        made.set_shape(tensor.name, *zip(*ranges, strict=True))
    return made


def _contract(trt: Any, network: Any) -> Contract:
    def bindings(tensors: list[Any]) -> tuple[Binding, ...]:
        return tuple(Binding(t.name, _DTYPES.get(t.dtype.name, t.dtype.name), _symbols(t)) for t in tensors)

    updates = [layer for layer in _layers(network) if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    aliases = tuple((layer.get_output(0).name, layer.get_input(0).name) for layer in updates)
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Contract(bindings(_inputs(network)), bindings(outputs), aliases)


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(i) for i in range(network.num_inputs)]


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def _symbols(tensor: Any) -> tuple[int | str, ...]:
    return tuple(tensor.get_dimension_name(i) or -1 if size < 0 else size for i, size in enumerate(tensor.shape))
