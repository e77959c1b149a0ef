"""The backends TensorRT and TensorRT-RTX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.dtypes import COMPUTE, HALF
from tandemrt.engines.recipe.backend import Backend, Library, Lowering, each_once
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import reject

ComputeCapability = Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]  # targets of TensorRT-RTX 1.7
Layers = Literal["native", "basic"]


@dataclass(frozen=True)
class LayerSet:
    """The layers that engines of a backend are built from, and what follows from them.

    Attributes:
        lowering: the lowering of the graphs.
        oldest: the oldest release of TensorRT that has the layers.
        dtypes: dtypes that decoders compute in.
        reports_aliases: a layer updates a cache in place and the engine reports so. If not, an engine that writes a
            cache where it reads it gets the same result, because writing a row twice changes nothing.
        plugins: engines may contain the project's plugins.
    """

    lowering: Literal["mask", "basic"]
    oldest: tuple[int, int]
    dtypes: tuple[str, ...]
    reports_aliases: bool
    plugins: bool


LAYER_SETS: Mapping[Layers, LayerSet] = {
    "native": LayerSet("mask", (10, 15), HALF, reports_aliases=True, plugins=True),
    "basic": LayerSet("basic", (8, 6), COMPUTE, reports_aliases=False, plugins=False),
}


class _TensorRtBackend(Backend):
    """What TensorRT and TensorRT-RTX share."""

    folder: ClassVar[str] = "tensorrt"
    # Those that run over a linear cache without onnxruntime's operators.
    drafts: ClassVar[tuple[str, ...]] = tuple(
        kind for kind, traits in DRAFT_KINDS.items() if not traits.block and not traits.reads_cache
    )
    no_other_dtype: ClassVar[str] = "whose attention layer has no other"

    @property
    def layer_set(self) -> LayerSet:
        return LAYER_SETS["native"]

    @property
    def plugins(self) -> bool:
        """Whether verification is an engine with plugins."""
        return False

    @property
    def lowering(self) -> Lowering:
        return self.layer_set.lowering

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.layer_set.dtypes


class TensorRt(_TensorRtBackend):
    """TensorRT: builds on the GPU that will run the engines, because it times kernels there.

    Attributes:
        layers: *native*: TensorRT's own layers for attention, cache update, rotary embedding and RMS norm, from release
            10.15 on; *basic*: layers that every release has.
        python: interpreter whose ``tensorrt`` builds the engines; None: this one. It needs numpy besides.
        headers: folder of the C++ headers (``NvInfer.h``) of that interpreter's TensorRT. With them verification is an
            engine with the project's plugins, which a C++ compiler compiles for that release; the engine contains them.
            None: the project's kernels verify, without TensorRT.
        version_compatible: the engine also opens in later releases: of the same major version, and of version 10 if
            8.6 built it.
        hardware_compatibility: GPUs that run the engine. *ampere_plus*: compute capability 8.0 and later;
            *same_compute_capability*: the compute capability of the building GPU; *none*: that model of GPU alone.
        workspace_mib: limit of a kernel's scratch memory in MiB; None: TensorRT's default.
        optimization_level: 0 builds fastest, 5 searches longest.
    """

    times_kernels: ClassVar[bool] = True
    library: ClassVar[Library] = Library(
        "tensorrt",
        ("tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_dispatch", "tensorrt_dispatch_bindings"),
        packages=("tensorrt", "tensorrt-cu13"),
        builds=(11,),
        runs=(10, 11),
        tested="10.16, 11.4",
        extras=("tensorrt", "tensorrt-lean"),
        opens={
            10: "version-compatible plans of 8.6 and of earlier releases of 10",
            11: "version-compatible plans of 10 and of earlier releases of 11",
        },
    )
    name: Literal["tensorrt"]
    layers: Layers = "native"
    python: Annotated[str, StringConstraints(min_length=1)] | None = None
    headers: Annotated[str, StringConstraints(min_length=1)] | None = None
    version_compatible: bool = False
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    workspace_mib: Annotated[int, Field(ge=1)] | None = None
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3

    @property
    def layer_set(self) -> LayerSet:
        return LAYER_SETS[self.layers]

    @property
    def plugins(self) -> bool:
        """Whether verification is an engine with plugins. Another interpreter has those in C++ only."""
        return self.headers is not None or (self.layer_set.plugins and self.python is None)

    @model_validator(mode="after")
    def _contains_its_plugins(self) -> "TensorRt":
        if self.headers is not None and (self.python is None or not self.version_compatible):
            raise reject(
                "headers needs python, whose TensorRT builds the plugins in, and version_compatible = true: only such "
                f"an engine contains its plugins; got python {quoted(self.python)} and version_compatible "
                f"{str(self.version_compatible).lower()}. Write both, or leave headers out"
            )
        return self


class TensorRtRtx(_TensorRtBackend):
    """TensorRT-RTX: builds on any machine one engine for all ``compute_capabilities``. It has no plugins."""

    static_float8: ClassVar[bool] = True
    library: ClassVar[Library] = Library(
        "tensorrt_rtx_bindings",
        (),
        packages=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
        builds=(1,),
        runs=(1,),
        tested="1.7",
        extras=("tensorrt-rtx",),
        opens={1: "no others"},
    )
    name: Literal["tensorrt-rtx"]
    compute_capabilities: Annotated[
        tuple[ComputeCapability, ...], Field(strict=False, min_length=1), AfterValidator(each_once)
    ]

    @classmethod
    def default_section(cls, name: str, dtypes: set[str]) -> dict[str, Any]:
        """Return the section with every compute capability that supports ``dtypes``."""
        return {"name": name, "compute_capabilities": rtx_capabilities(dtypes)}

    @property
    def named_capabilities(self) -> tuple[str, ...]:
        return self.compute_capabilities

    def require_dtypes(self, dtypes: set[str]) -> None:
        super().require_dtypes(dtypes)
        if "7.5" in self.compute_capabilities and "bfloat16" in dtypes:
            raise reject(
                "dtype must be float16 for compute capability 7.5, which has no bfloat16; got 'bfloat16'. Choose "
                "float16 or drop 7.5 from backend.compute_capabilities"
            )


def rtx_capabilities(dtypes: set[str]) -> tuple[str, ...]:
    """Return the compute capabilities that TensorRT-RTX builds models of ``dtypes`` for: bfloat16 needs 8.0."""
    return tuple(c for c in get_args(ComputeCapability) if c != "7.5" or "bfloat16" not in dtypes)
