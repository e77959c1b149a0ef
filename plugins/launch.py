"""What every launcher of an operator takes and gives, whatever device it is for."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandemrt.plugins.tensors import torch

if TYPE_CHECKING:
    import onnx_ir as ir

    from tandemrt.plugins.kernels.module import KernelModule

Made = TypeVar("Made")


class Call(Protocol):
    """Work with its tensors bound: shapes and addresses are fixed, only contents change between runs."""

    def run(self) -> None:
        """Enqueue one run on the device's current stream (on a CPU: run it)."""


class Function(Protocol):
    """Makes the body of an operator, and those of the functions it calls."""

    def __call__(self, dtype: str, given: Collection[str]) -> "tuple[ir.Function, ...]":
        """For T = ``dtype`` and the optional inputs and outputs among ``given``."""


@dataclass(frozen=True)
class Context:
    """What the launches of one engine share. They must follow one another on one stream.

    ``kernels`` is the folder of compiled kernels, which a GPU needs; ``threads`` limits those of a CPU (None: one per
    core); ``sizes`` are those of the largest call, by symbol, where launches depend on them. ``batch_invariant``: a
    token is rounded the same whatever else is in a call.
    """

    device: torch.device
    kernels: Path | None = None
    threads: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch_invariant: bool = False
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What was made for ``key`` before, else what ``make`` makes now."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def module(self, name: str) -> "KernelModule":
        """The kernels of ``NAME.cu``. Raises BackendUnavailable if none fits the device."""
        from tandemrt.plugins.kernels.module import KernelModule

        assert self.kernels is not None
        folder = self.kernels
        return self.keep(("module", name), lambda: KernelModule.open(folder, name, self.device))


Tensors = Mapping[str, torch.Tensor]
# Tensors by their names in the operator's schema, those that are changed in place by the input's name alone; what an
# optional name has no tensor for is left out. Attributes as in the schema; a launcher may know hints beside them.
Launcher = Callable[[Tensors, Mapping[str, Any], Context], Call]
