"""TensorRT plugins: an operator, the shapes of its outputs, and the single kernel launch that computes them.

This module does not need TensorRT. A dimension is an int, or any value with addition, multiplication and division, such
as TensorRT's symbolic expressions at build time. The same function therefore computes the launch of an engine and the
launch of a test on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.engines.contract.operators import SCHEMAS, Schema
from tandemrt.plugins.kernels.compile import compile_ptx

Dim = Any  # int, or a symbolic expression
Shapes = Mapping[str, Sequence[Dim]]

_TYPES = {"fp32": "float", "fp16": "fp16", "bf16": "bf16"}  # in CUDA C++
_ARCHITECTURE = "8.0"  # the first with bfloat16; the driver compiles its PTX for later GPUs


@dataclass(frozen=True)
class PluginLaunch:
    """Grid and threads per block; ``scalars`` are the int32 arguments between input and output addresses."""

    grid: tuple[Dim, Dim, Dim]
    threads: int
    scalars: tuple[Dim, ...]


@dataclass(frozen=True)
class Plugin:
    """One operator. The kernel ``NAME_SUFFIX`` of ``header`` takes inputs, scalars and outputs, in this order."""

    schema: Schema
    header: str
    output_shapes: Callable[[Shapes], tuple[tuple[Dim, ...], ...]]
    launch: Callable[[Shapes], PluginLaunch]

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def inputs(self) -> tuple[Binding, ...]:
        return self.schema.inputs

    @property
    def outputs(self) -> tuple[Binding, ...]:
        return self.schema.outputs

    def kernel(self, dtype: str) -> str:
        """Return the name of the kernel for logits of ``dtype``, one of KERNEL_SUFFIX."""
        return f"{self.name}_{KERNEL_SUFFIX[dtype]}"

    def ptx(self, dtype: str) -> str:
        """Compile only that kernel to PTX. Raises BackendUnavailable without NVRTC."""
        suffix = KERNEL_SUFFIX[dtype]
        return _ptx(f'#include "{self.header}"\n{self.name.upper()}({suffix}, {_TYPES[suffix]})\n')


@cache
def _ptx(source: str) -> str:
    return compile_ptx(source, _ARCHITECTURE)


def _verified(shapes: Shapes) -> tuple[tuple[Dim, ...], ...]:
    batch, rows, _ = shapes["logits"]
    return (batch, rows), (batch,)


def _verify_launch(shapes: Shapes) -> PluginLaunch:
    batch, rows, vocab = shapes["logits"]
    return PluginLaunch(grid=(batch, 1, 1), threads=1024, scalars=(rows, vocab))


def _bitmask_launch(shapes: Shapes) -> PluginLaunch:
    batch, rows, vocab = shapes["logits"]
    return PluginLaunch(grid=((vocab + 2047) // 2048, batch * rows, 1), threads=256, scalars=(vocab,))


PLUGINS = (
    Plugin(SCHEMAS["token_bitmask"], "bitmask.cuh", lambda shapes: (tuple(shapes["logits"]),), _bitmask_launch),
    Plugin(SCHEMAS["verify_draft"], "verify_one.cuh", _verified, _verify_launch),
    Plugin(SCHEMAS["verify_draft_probs"], "verify_one.cuh", _verified, _verify_launch),
)
