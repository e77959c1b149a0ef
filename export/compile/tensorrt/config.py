"""The builder's configuration from a recipe's backend section: what TensorRT and TensorRT-RTX differ in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines.errors import BackendUnavailable, BadRecipe
from tandemrt.engines.gpus import built_for
from tandemrt.engines.tensorrt.library import logger
from tandemrt.engines.tensorrt.recipe import TensorRt, TensorRtRtx
from tandemrt.engines.user_cache import cache_folder, write_file


def configure(trt: Any, config: Any, options: TensorRt | TensorRtRtx) -> str:
    """Set ``options``; return what the engine is built for, "sm_86+sm_120". Raises BadRecipe or BackendUnavailable."""
    if isinstance(options, TensorRtRtx):
        _name_gpus(trt, config, options.compute_capabilities)
        return built_for(options.compute_capabilities)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    level = options.hardware_compatibility.upper()
    config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.__members__[level]
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.builder_optimization_level = options.optimization_level
    # Captured into CUDA graphs: nothing may be allocated while the engine runs.
    if flag := trt.BuilderFlag.__members__.get("REQUIRE_USER_ALLOCATION"):
        config.set_flag(flag)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the inspector tells what each layer became
    if options.hardware_compatibility == "ampere_plus":
        return built_for(["8.0"], and_later=True)
    return built_for([".".join(map(str, gpu()))])


def gpu() -> tuple[int, int]:
    """The compute capability of the GPU that TensorRT builds on. Raises BackendUnavailable without one."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend tensorrt builds on the GPU that runs the engines, and torch finds none here; build on that "
            "machine, or choose backend tensorrt-rtx, which builds ahead of time"
        )
    return torch.cuda.get_device_capability()


def timing_cache_file(trt: Any) -> Path:
    """Where timings are kept when nobody says: the user's cache folder, one file per release and kind of GPU."""
    gpu_name = torch.cuda.get_device_name().replace(" ", "-")
    return cache_folder() / f"tensorrt-{trt.__version__}-{gpu_name}.timing"


def load_timings(config: Any, file: Path) -> None:
    """Give the builder the timings in ``file``; those of another release or GPU, and none at all, start afresh."""
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def save_timings(config: Any, file: Path) -> None:
    """Keep what the builder has timed for the next build. Raises OSError if ``file`` cannot be written."""
    write_file(file, bytes(config.get_timing_cache().serialize()))


def _name_gpus(trt: Any, config: Any, capabilities: Sequence[str]) -> None:
    known = trt.ComputeCapability.__members__
    config.num_compute_capabilities = len(capabilities)
    for position, text in enumerate(capabilities):
        wanted = known.get(f"SM{text.replace('.', '')}")
        if wanted is None or not config.set_compute_capability(wanted, position):
            supported = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in known if name.startswith("SM"))
            raise BadRecipe(
                f"compute_capabilities: tensorrt-rtx {trt.__version__} does not support {text!r} "
                f"({logger(trt).said()}); supported: {supported}"
            )
