"""The opener of TensorRT and TensorRT-RTX."""

from collections.abc import Callable

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.opening import Opening
from tandemrt.runtime.device.backends.tensorrt import plan


def engine_opener(opening: Opening) -> Callable[[EngineName], Engine]:
    """Return the function that opens an engine by its name, see Opener. It raises as TensorRtEngine.open does."""
    from tandemrt.runtime.device.backends.tensorrt.engine import TensorRtEngine  # it imports torch

    return lambda name: TensorRtEngine.open(opening.bundle, name, opening.device)


def require_memory(bundle: Bundle, device: torch.device) -> None:
    """Raise BackendUnavailable if a GPU has too little memory for all engines of ``bundle``."""
    if not device_of(device).on_host:
        plan.require_memory(plan.memory_needed(bundle), device_of(device).free_memory())
