"""Just-in-time kernels of TensorRT-RTX, compiled for the present GPU and cached for the next start."""

import weakref
from pathlib import Path
from typing import Any

from tandemrt.engines.user_cache import cache_folder, write_cache
from tandemrt.runtime.device.backends.tensorrt.scratch import ScratchMemory


class Jit:
    """Makes the execution contexts of one engine, with memory that the caller provides.

    TensorRT-RTX (``active``) compiles kernels for a context's shapes in its first run only, and keeps them in a file of
    the user's cache folder, one per engine and release; ``key`` names the engine. TensorRT engines contain all kernels.
    """

    def __init__(self, trt: Any, engine: Any, key: str, scratch: ScratchMemory) -> None:
        self.active = hasattr(trt, "IRuntimeCache")
        self._trt = trt
        self._engine = engine
        self._scratch = scratch
        if self.active:
            config = engine.create_runtime_config()
            self._kernels = config.create_runtime_cache()
            file = kernel_cache_file(key, trt.__version__)
            if file.is_file():
                self._kernels.deserialize(file.read_bytes())  # a file of another GPU or driver leaves it empty
            weakref.finalize(self, save, self._kernels, file)

    def create_context(self, *, own_graphs: bool) -> Any:
        """Return an execution context, or None if TensorRT cannot make one.

        ``own_graphs`` lets TensorRT-RTX capture and replay the runs itself: for contexts that torch cannot capture.
        """
        if not self.active:
            return self._scratch.create_context(self._trt, self._engine)
        user_managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config = self._engine.create_runtime_config()
        config.set_runtime_cache(self._kernels)
        config.set_execution_context_allocation_strategy(user_managed)
        config.dynamic_shapes_kernel_specialization_strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        graphs = self._trt.CudaGraphStrategy
        config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if own_graphs else graphs.DISABLED
        return self._engine.create_execution_context(config)


def kernel_cache_file(key: str, version: str) -> Path:
    """The file of an engine's compiled kernels; ``key`` is its sha256."""
    return cache_folder() / f"tensorrt-rtx-{version}-{key[:16]}.kernels"


def save(kernels: Any, file: Path) -> None:
    """Write a runtime cache to ``file`` atomically."""
    write_cache(file, bytes(kernels.serialize()))
