"""A backend is one class: its fields are the ``[backend]`` section of a recipe, the rest is the row of its facts.

``engines/recipe/backends.py`` lists the backends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import Section, reject

DeviceKind = Literal["cpu", "cuda"]
Lowering = Literal["length", "mask", "basic", "grouped", "paged"]  # the forms of graphs (docs/design.md)


def each_once(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``capabilities``, for fields of sections. Raises ValueError if one is named twice."""
    if len(set(capabilities)) < len(capabilities):
        raise reject(f"must name each capability once; got {', '.join(capabilities)}")
    return capabilities


@dataclass(frozen=True)
class Library:
    """The Python modules of a backend's engine library.

    Attributes:
        builder: name of the Python module that builds engines.
        runtimes: names of further modules that only run engines, in order of preference.
        packages: distributions that install one of the modules.
        builds: major versions that build engines in this interpreter.
        runs: major versions that run engines.
        tested: versions that the tests run with.
        extras: extras of the project that install the builder, or only a runtime.
        opens: the plans of other releases that each of ``runs`` opens.
    """

    builder: str
    runtimes: tuple[str, ...]
    packages: tuple[str, ...]
    builds: tuple[int, ...]
    runs: tuple[int, ...]
    tested: str
    extras: tuple[str, ...]
    opens: Mapping[int, str]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules that run engines, in order of preference."""
        return self.builder, *self.runtimes


@dataclass(frozen=True)
class DefaultLimits:
    """Limits of the recipe that is written for a checkpoint without one.

    Attributes:
        batch: requests that run at once.
        memory_share: share of the free memory for weights and caches.
    """

    batch: int
    memory_share: float


class Backend(Section):
    """A backend. The class has what is the same for every recipe, a section of a recipe what its fields decide.

    Attributes:
        device: the kind of device that runs the engines.
        folder: name of its folders: export/compile/FOLDER has builder.py, which compiles a graph, and steps.py for one
            that is cut into steps; runtime/device/backends/FOLDER has opener.py, which opens an engine.
        library: the engine library that builds and runs engines; None: onnxruntime, which runs graphs.
        runs_on_cpu: a CPU runs the graphs too, whatever device they were built for.
        drafts: kinds of drafts that it runs.
        times_kernels: a build measures kernels, and keeps the times in a file.
        static_float8: its engine library multiplies float8 weights that come with static scales.
        no_other_dtype: why decoders have no other dtypes, as a relative clause; only for a backend that has not all.
        linear_chunk: prompt tokens of a round over a linear cache, by default.
        default_limits: for a checkpoint without a recipe; None: it needs one.
    """

    device: ClassVar[DeviceKind] = "cuda"
    folder: ClassVar[str]
    library: ClassVar[Library | None] = None
    runs_on_cpu: ClassVar[bool] = False
    drafts: ClassVar[tuple[str, ...]] = tuple(DRAFT_KINDS)
    times_kernels: ClassVar[bool] = False
    static_float8: ClassVar[bool] = False
    no_other_dtype: ClassVar[str] = ""
    linear_chunk: ClassVar[int] = 256
    default_limits: ClassVar[DefaultLimits | None] = None
    name: str

    @classmethod
    def default_section(cls, name: str, dtypes: set[str]) -> dict[str, Any]:  # noqa: ARG003
        """Return the section for models of ``dtypes`` that stands for a name on the command line."""
        return {"name": name}

    @property
    def cache_kind(self) -> CacheKind:
        """Layout of the KV caches."""
        return "linear"

    @property
    def lowering(self) -> Lowering:
        """The lowering of decoders."""
        raise NotImplementedError

    @property
    def attends_by_mask(self) -> bool:
        """Whether graphs attend by ONNX's operator with masks."""
        return self.lowering in ("mask", "basic")

    @property
    def ranks(self) -> int:
        """Processes that the target is split over."""
        return 1

    @property
    def batch_invariance(self) -> bool | None:
        """Whether the target computes the same bits for a token whatever else is in the call; None: if that is cheap.

        A CPU always does; this is about kernels of a GPU.
        """
        return False

    @property
    def named_capabilities(self) -> tuple[str, ...]:
        """Compute capabilities that the section names."""
        return ()

    @property
    def kernel_capabilities(self) -> tuple[str, ...]:
        """Compute capabilities to compile kernels for; empty: the engines determine them."""
        return ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of decoders."""
        return COMPUTE

    def require_dtypes(self, dtypes: set[str]) -> None:
        """Raise an error for a dtype of a decoder that the backend does not support."""
        if unsupported := dtypes - set(self.dtypes):
            *first, last = self.dtypes
            raise reject(
                f"dtype must be {', '.join(first)} or {last} when backend.name is {self.name!r}, "
                f"{self.no_other_dtype}; got {quoted(min(unsupported))}. Choose another dtype (export build: "
                "--dtype float16) or another backend"
            )
