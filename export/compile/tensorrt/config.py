"""Builder configuration of TensorRT and TensorRT-RTX from a recipe's backend section."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.gpus import built_for
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.engines.user_cache import cache_folder, write_file
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.compile.tensorrt import worker
from tandemrt.plugins.tensorrt.modules import logger
from tandemrt.plugins.tensors.devices.lookup import gpus


def configure(trt: Any, config: Any, options: TensorRt | TensorRtRtx) -> str:
    """Apply ``options`` to ``config``; return the GPUs that the engine is built for, as in "sm_86+sm_120".

    Raises BadRecipe or BackendUnavailable.
    """
    if isinstance(options, TensorRtRtx):
        _name_gpus(trt, config, options.compute_capabilities)
        return built_for(options.compute_capabilities)
    worker.set_options(trt, config, options)
    return built_on(options)


def built_on(options: TensorRt) -> str:
    """Return the GPUs that an engine is built for which TensorRT builds on the GPU here."""
    if options.hardware_compatibility == "ampere_plus":
        return built_for(["8.0"], and_later=True)
    return built_for([".".join(map(str, gpu()))])


def gpu() -> tuple[int, int]:
    """Return the compute capability of the GPU that TensorRT builds on. Raises BackendUnavailable without one."""
    if not gpus():
        raise BackendUnavailable(
            "backend tensorrt builds on the GPU that runs the engines, and torch finds none here; build on that "
            "machine, or choose backend tensorrt-rtx, which builds ahead of time"
        )
    return gpus()[0].capability


def timing_cache_file(version: str) -> Path:
    """Return the default file of timings: in the user's cache folder, one file per release and kind of GPU."""
    gpu_name = gpus()[0].name.replace(" ", "-")
    return cache_folder() / f"tensorrt-{version}-{gpu_name}.timing"


def load_timings(config: Any, file: Path) -> None:
    """Load the timings in ``file``. Timings of another release or GPU, or a missing file, give an empty cache."""
    worker.load_timings(config, file.read_bytes() if file.is_file() else b"")


def save_timings(config: Any, file: Path) -> None:
    """Save the builder's timings for the next build. Raises OSError if ``file`` cannot be written."""
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
                f"({logger(trt).summary()}); supported: {supported}"
            )
