"""The ``[backend]`` section of a recipe for TensorRT and for TensorRT-RTX."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from tandemrt.engines.validation import Section, refuse

ComputeCapability = Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]  # what TensorRT-RTX 1.7 builds for


class TensorRt(Section):
    """TensorRT builds on the GPU that will run the engines, and times kernels on it.

    ``version_compatible``: the engine also opens in later releases of the same major version.
    ``hardware_compatibility``: *ampere_plus* builds for every GPU from compute capability 8.0 on,
    *same_compute_capability* for every GPU of the one it was built on; *none* for that GPU alone.
    ``workspace_mib``: most scratch memory a kernel may use while it is timed and run; None leaves it to TensorRT.
    ``optimization_level``: 0 builds fastest, 5 searches longest.
    """

    name: Literal["tensorrt"]
    version_compatible: bool = False
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    workspace_mib: Annotated[int, Field(ge=1)] | None = None
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3


class TensorRtRtx(Section):
    """TensorRT-RTX builds anywhere, ahead of time, for all ``compute_capabilities`` in one engine."""

    name: Literal["tensorrt-rtx"]
    compute_capabilities: Annotated[tuple[ComputeCapability, ...], Field(strict=False, min_length=1)]

    @field_validator("compute_capabilities")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise refuse(f"must name each capability once; got {', '.join(value)}")
        return value


def rtx_capabilities(dtypes: set[str]) -> tuple[str, ...]:
    """Every compute capability that TensorRT-RTX builds models of ``dtypes`` for: bfloat16 begins at 8.0."""
    return tuple(c for c in get_args(ComputeCapability) if c != "7.5" or "bfloat16" not in dtypes)
