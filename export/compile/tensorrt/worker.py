"""Build one engine with the ``tensorrt`` of whichever interpreter runs this file: ``python worker.py JOB``.

The file needs Python 3.8, its standard library and TensorRT 8.6 or later; nothing else of the project is imported. JOB
is a JSON file (``Job``); the result is a JSON file next to the plan. ``python worker.py`` alone prints the release.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

# Kernels of these libraries would have to be installed where the plan runs. Later releases do not use them either.
_OTHER_LIBRARIES = ("CUBLAS", "CUBLAS_LT", "CUDNN")
# Layers that compute; TensorRT may choose another precision for them unless the network is strongly typed.
_COMPUTING = ("ACTIVATION", "ELEMENTWISE", "MATRIX_MULTIPLY", "REDUCE", "SOFTMAX", "UNARY")


class Job(NamedTuple):
    """What to build. ``profiles``: per profile, input -> least, best and largest shape. ``result``: see ``build``.

    ``plugins``: libraries of plugins that the network uses; a version-compatible plan contains them.
    """

    onnx: str
    plan: str
    result: str
    timing_cache: str
    plugins: list[str]
    profiles: list[dict[str, list[list[int]]]]
    half: bool
    version_compatible: bool
    hardware_compatibility: str
    workspace_mib: int | None
    optimization_level: int


class Failed(Exception):
    """TensorRT did not build the engine; the log has the reason."""


def build(trt: Any, log: Any, job: Job) -> dict[str, Any]:
    """Write the plan of ``job``. Return layers, bindings, memory and fused layers of the engine."""
    builder = trt.Builder(log)
    typed = trt.NetworkDefinitionCreationFlag.__members__.get("STRONGLY_TYPED")
    flag = trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH if typed is None else typed
    network = builder.create_network(1 << int(flag))
    for library in job.plugins:
        trt.get_plugin_registry().load_library(library)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(job.onnx):
        raise Failed("; ".join(_described(parser.get_error(i)) for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    set_options(trt, config, job)
    if job.plugins:
        config.plugins_to_serialize = job.plugins
    if typed is None:
        keep_dtypes(trt, network, config, half=job.half)
    timings = Path(job.timing_cache)
    load_timings(config, timings.read_bytes() if timings.is_file() else b"")
    for shapes in job.profiles:
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        config.add_optimization_profile(profile)
    log.errors.clear()  # 8.6 reports an error for every kept cache, although it takes the timings
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise Failed("the builder returned no plan")
    Path(job.plan).write_bytes(plan)
    timings.write_bytes(config.get_timing_cache().serialize())
    sides = [(network.get_input, network.num_inputs), (network.get_output, network.num_outputs)]
    inputs, outputs = ([_binding(get(i)) for i in range(count)] for get, count in sides)
    return {
        "layers": count_layers(network),
        "inputs": inputs,
        "outputs": outputs,
        "aliases": aliases(network),
        **opened(trt, log, bytes(plan), len(job.profiles)),
    }


def set_options(trt: Any, config: Any, options: Any) -> None:
    """Apply the options of a recipe's ``[backend]`` section. Raises Failed for one that the release does not have."""
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    level = trt.HardwareCompatibilityLevel.__members__.get(options.hardware_compatibility.upper())
    if level is None:
        known = ", ".join(name.lower() for name in trt.HardwareCompatibilityLevel.__members__)
        raise Failed(f"hardware_compatibility must be one of {known} in this release")
    config.hardware_compatibility_level = level
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.builder_optimization_level = options.optimization_level
    # The engine is captured into CUDA graphs, so it must not allocate while it runs.
    if "REQUIRE_USER_ALLOCATION" in trt.BuilderFlag.__members__:
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the inspector's report of each layer
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
    if hasattr(config, "max_aux_streams"):
        config.max_aux_streams = 0  # the runtime orders all calls by one stream
    # Contexts of several shapes use one profile. Later releases always allow that.
    sharing = getattr(trt, "PreviewFeature", None) and trt.PreviewFeature.__members__.get("PROFILE_SHARING_0806")
    if sharing:
        config.set_preview_feature(sharing, True)
    if hasattr(config, "set_tactic_sources") and hasattr(trt, "TacticSource"):
        own = [int(value) for name, value in trt.TacticSource.__members__.items() if name not in _OTHER_LIBRARIES]
        config.set_tactic_sources(sum(1 << value for value in own))


def keep_dtypes(trt: Any, network: Any, config: Any, *, half: bool) -> None:
    """Make a network that is not strongly typed compute in the dtypes of the graph: float32 where it says so."""
    if not half:
        return  # no other type is allowed than float32
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    for layer in layers(network):
        dtype = layer.get_output(0).dtype
        if layer.type.name in _COMPUTING and dtype in (trt.float32, trt.float16):
            layer.precision = dtype
            layer.set_output_type(0, dtype)


def load_timings(config: Any, timings: bytes) -> None:
    """Load kept timings. Those of another release or GPU, or none, give an empty cache."""
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def aliases(network: Any) -> list[tuple[str, str]]:
    """Return the outputs that a layer writes in place, each with the input whose memory it shares."""
    updates = [layer for layer in layers(network) if layer.type.name == "KV_CACHE_UPDATE"]
    return [(layer.get_output(0).name, layer.get_input(0).name) for layer in updates]


def count_layers(network: Any) -> dict[str, int]:
    """Count the network's layers by kind, as parsed, before the builder fuses them."""
    return dict(sorted(Counter(layer.type.name for layer in layers(network)).items()))


def layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def opened(trt: Any, log: Any, plan: bytes, profiles: int) -> dict[str, Any]:
    """Open a plan on the GPU that it was built for. Return its memory by profile and fused layers, or the reason."""
    runtime = trt.Runtime(log)
    runtime.engine_host_code_allowed = True  # this process built it
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return {"memory": [None] * profiles, "engine_layers": None, "engine_not_opened": log.summary()}
    if hasattr(engine, "get_device_memory_size_for_profile_v2"):
        memory = [engine.get_device_memory_size_for_profile_v2(i) for i in range(profiles)]
    else:  # one size for all
        memory = [engine.device_memory_size] * profiles
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return {"memory": memory, "engine_layers": json.loads(text).get("Layers", []), "engine_not_opened": None}


def _binding(tensor: Any) -> list[Any]:
    return [tensor.name, tensor.dtype.name, list(tensor.shape)]


def _described(error: Any) -> str:
    if not hasattr(error, "node_name"):
        return f"node {error.node()}: {error.desc()}"
    return f"node {error.node_name()} ({error.node_operator()}): {error.desc()}"


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # the base exists only where TensorRT is installed
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message.strip())

        def summary(self) -> str:
            return "; ".join(dict.fromkeys(self.errors))

    return Logger()


def main(arguments: list[str]) -> None:
    import tensorrt as trt

    if not arguments:
        print(json.dumps({"version": trt.__version__}))
        return
    job = Job(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    log, begin = _logger(trt), time.time()
    result: dict[str, Any] = {"version": trt.__version__, "error": None}
    try:
        result.update(build(trt, log, job))
    except (Failed, TypeError) as error:  # pybind11 raises TypeError if a factory returns nothing
        result["error"] = "; ".join(filter(None, [str(error), log.summary()]))
    result["seconds"] = time.time() - begin
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
