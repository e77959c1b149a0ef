"""The backends: those of onnxruntime, and the list of all.

A new backend is a class here, a builder in export/compile and an opener in runtime/device/backends.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.dtypes import BITS, COMPUTE
from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES, KernelCapability
from tandemrt.engines.recipe.backend import Backend, DefaultLimits, DeviceKind, Library, Lowering, each_once
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx

Ranks = Literal[1, 2, 4, 8]  # processes that a target can be split over


class OnnxRuntimeCpu(Backend):
    """ONNX Runtime on a CPU. Error messages recommend it, because it runs every model."""

    device: ClassVar[DeviceKind] = "cpu"
    folder: ClassVar[str] = "onnxruntime"
    runs_on_cpu: ClassVar[bool] = True
    no_other_dtype: ClassVar[str] = "which has no bfloat16 kernels"
    default_limits: ClassVar[DefaultLimits | None] = DefaultLimits(batch=4, memory_share=0.5)
    name: Literal["onnxruntime-cpu"]

    @property
    def lowering(self) -> Lowering:
        return "grouped"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return "float32", "float16", *BITS


class OnnxRuntimeCuda(Backend):
    """ONNX Runtime on an NVIDIA GPU.

    Attributes:
        cache: *paged* runs attention in kernels of TandemRT between subgraphs. *linear*, experimental, runs one graph,
            for families and head sizes that *paged* rejects; it is slow because CUDA graphs cannot capture it.
        batch_invariant: the target computes the same bits for a token whatever else is in the call, so speculation
            changes no text (docs/invariance.md). None: where that costs little.
        tensor_parallel: ranks that the target is split over, each with its part of the weights and of the KV cache.
        compute_capabilities: targets of the compiled kernels. The driver translates those of the lowest one for newer
            GPUs.
    """

    folder: ClassVar[str] = "onnxruntime"
    runs_on_cpu: ClassVar[bool] = True
    linear_chunk: ClassVar[int] = 512
    default_limits: ClassVar[DefaultLimits | None] = DefaultLimits(batch=32, memory_share=0.85)
    name: Literal["onnxruntime-cuda"]
    cache: CacheKind = "paged"
    batch_invariant: bool | None = None
    tensor_parallel: Ranks = 1
    compute_capabilities: Annotated[
        tuple[KernelCapability, ...], Field(strict=False, min_length=1), AfterValidator(each_once)
    ] = COMPUTE_CAPABILITIES

    @property
    def cache_kind(self) -> CacheKind:
        return self.cache

    @property
    def lowering(self) -> Lowering:
        return "paged" if self.cache == "paged" else "length"

    @property
    def ranks(self) -> int:
        return self.tensor_parallel

    @property
    def batch_invariance(self) -> bool | None:
        return False if self.batch_invariant is None and self.cache == "linear" else self.batch_invariant

    @property
    def named_capabilities(self) -> tuple[str, ...]:
        return self.compute_capabilities

    @property
    def kernel_capabilities(self) -> tuple[str, ...]:
        return self.compute_capabilities

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (*COMPUTE, *BITS) if self.cache == "paged" else COMPUTE


AnyBackend = Annotated[OnnxRuntimeCpu | OnnxRuntimeCuda | TensorRt | TensorRtRtx, Field(discriminator="name")]


def backend_name(backend: type[Backend]) -> str:
    """Return the name that recipes and manifests have for a backend."""
    (name,) = get_args(backend.model_fields["name"].annotation)
    return str(name)


BACKENDS: Mapping[str, type[Backend]] = {
    backend_name(backend): backend for backend in (OnnxRuntimeCpu, OnnxRuntimeCuda, TensorRt, TensorRtRtx)
}


def library_of(name: str) -> Library | None:
    """Return the engine library of a backend; None if onnxruntime runs its graphs, or no backend has this name."""
    return BACKENDS[name].library if name in BACKENDS else None


DEFAULT = OnnxRuntimeCpu(name="onnxruntime-cpu")
# In error messages, as a recipe writes them.
CPU, CUDA = backend_name(OnnxRuntimeCpu), backend_name(OnnxRuntimeCuda)
PAGED = f"'{CUDA}' with cache = 'paged'"
