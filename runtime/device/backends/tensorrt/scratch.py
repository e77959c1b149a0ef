"""Scratch memory of an engine's execution contexts, one block from torch for all of them."""

import warnings
from typing import Any

import torch

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.plugins.tensors.devices.cuda import CudaDevice
from tandemrt.runtime.device.backends.tensorrt.plan import require_memory


class ScratchMemory:
    """The memory that all contexts of an engine share, so its calls must share one stream.

    Engines of releases before 10.1 take it by calls that later releases call deprecated (``older``).
    """

    def __init__(self, engine: Any, name: EngineName, device: torch.device) -> None:
        size = engine.device_memory_size_v2
        with _without_deprecations():
            self.older = size == 0 and getattr(engine, "device_memory_size", 0) > 0
            size = engine.device_memory_size if self.older else size
        require_memory({f"scratch memory of engine {name}": size}, CudaDevice(device).free_memory())
        self.block = torch.empty(max(size, 1), dtype=torch.uint8, device=device)

    def create_context(self, trt: Any, engine: Any) -> Any:
        """Return a context of TensorRT that waits for its memory, or None if TensorRT cannot make one."""
        if not self.older:
            return engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        with _without_deprecations():
            return engine.create_execution_context_without_device_memory()

    def provide(self, context: Any) -> None:
        """Let ``context`` use the memory. Its profile and shapes must be set."""
        if not self.older:
            context.set_device_memory(self.block.data_ptr(), self.block.numel())
            return
        with _without_deprecations():
            context.device_memory = self.block.data_ptr()


def _without_deprecations() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
