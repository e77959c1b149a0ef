"""Types that every launcher of an operator takes and returns, on every device."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandemrt.plugins.tensors import torch

if TYPE_CHECKING:
    import onnx_ir as ir

Made = TypeVar("Made")


class Call(Protocol):
    """An operator bound to tensors: shapes and addresses are fixed, contents may change between runs."""

    def run(self) -> None:
        """Enqueue one run on the device's current stream (on a CPU: run it)."""


class FunctionBuilder(Protocol):
    """Builder of the ONNX function of an operator, and of the functions that it calls."""

    def __call__(self, dtype: str, present: Collection[str]) -> "tuple[ir.Function, ...]":
        """Return the functions for T = ``dtype`` and the optional inputs and outputs in ``present``."""


class Ranks(Protocol):
    """This process, number ``rank``, among ``count`` that run an engine together: SharedRanks, or DeviceRanks."""

    rank: int
    count: int


@dataclass(frozen=True)
class Context:
    """State that the calls of one engine share. They must run one after another on one stream.

    ``kernels`` is the folder of compiled kernels, required on a GPU. ``threads`` limits the threads of a CPU (None: one
    per core). ``sizes`` are those of the largest call, by symbol, for calls that depend on them. ``batch_invariant``:
    a token's result does not depend on the other tokens of the call. ``ranks``: the processes that run this engine
    together; None: one process.
    """

    device: torch.device
    kernels: Path | None = None
    threads: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch_invariant: bool = False
    ranks: "Ranks | None" = None
    _cached: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def get_or_create(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the object stored for ``key``, or store and return ``make()``."""
        if key not in self._cached:
            self._cached[key] = make()
        value: Made = self._cached[key]
        return value


Tensors = Mapping[str, torch.Tensor]
# Tensors by their names in the operator's schema. A tensor that is changed in place has the input's name only. Optional
# names without a tensor are left out. Attributes are those of the schema; a launcher may accept further hints.
Launcher = Callable[[Tensors, Mapping[str, Any], Context], Call]
