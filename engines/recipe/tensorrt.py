"""``[backend]`` sections of a recipe: TensorRT and TensorRT-RTX."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from tandemrt.engines.validation.records import Section, reject

ComputeCapability = Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]  # targets of TensorRT-RTX 1.7


class TensorRt(Section):
    """TensorRT: builds on the GPU that will run the engines, because it times kernels there.

    Attributes:
        version_compatible: the engine also opens in later releases of the same major version.
        hardware_compatibility: GPUs that run the engine. *ampere_plus*: compute capability 8.0 and later;
            *same_compute_capability*: the compute capability of the building GPU; *none*: that model of GPU alone.
        workspace_mib: limit of a kernel's scratch memory in MiB; None: TensorRT's default.
        optimization_level: 0 builds fastest, 5 searches longest.
    """

    name: Literal["tensorrt"]
    version_compatible: bool = False
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    workspace_mib: Annotated[int, Field(ge=1)] | None = None
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3


class TensorRtRtx(Section):
    """TensorRT-RTX: builds on any machine one engine for all ``compute_capabilities``."""

    name: Literal["tensorrt-rtx"]
    compute_capabilities: Annotated[tuple[ComputeCapability, ...], Field(strict=False, min_length=1)]

    @field_validator("compute_capabilities")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise reject(f"must name each capability once; got {', '.join(value)}")
        return value


def rtx_capabilities(dtypes: set[str]) -> tuple[str, ...]:
    """Return the compute capabilities that TensorRT-RTX builds models of ``dtypes`` for: bfloat16 needs 8.0."""
    return tuple(c for c in get_args(ComputeCapability) if c != "7.5" or "bfloat16" not in dtypes)
